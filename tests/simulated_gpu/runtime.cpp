// The CUDA runtime that torch is to find: a GPU whose memory is the host's and whose streams are
// threads. See __init__.py.
//
// What kernels do, `kernels.py` puts into the streams. A kernel that torch launches itself ends the
// process: nothing would compute it.

#include <cuda_runtime_api.h>
#undef cudaGetDeviceProperties

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

constexpr size_t kMemory = size_t(16) << 30;
constexpr int kUnused = 1;  // the value of what torch asks for and nothing here depends on

int microseconds(const char* name) {
  const char* value = getenv(name);
  return value ? atoi(value) : 0;
}

// A thread that waits for the device lets go of Python's lock: kernels need it.
class WithoutPython {
 public:
  WithoutPython() {
    if (is_finalizing_ && !is_finalizing_() && holds_ && holds_()) state_ = save_();
  }
  ~WithoutPython() {
    if (state_) restore_(state_);
  }

 private:
  template <class F>
  static F* find(const char* name) { return reinterpret_cast<F*>(dlsym(RTLD_DEFAULT, name)); }

  static inline auto is_finalizing_ = find<int()>("_Py_IsFinalizing");
  static inline auto holds_ = find<int()>("PyGILState_Check");
  static inline auto save_ = find<void*()>("PyEval_SaveThread");
  static inline auto restore_ = find<void(void*)>("PyEval_RestoreThread");
  void* state_ = nullptr;
};

// What was put into it runs in order, on a thread of its own.
class Stream {
 public:
  explicit Stream(int priority = 0, const char* delay = "SIMULATED_SIDE_DELAY")
      : priority(priority), delay_(delay) {}

  uint64_t push(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (pushed_ == 0) std::thread(&Stream::run, this).detach();
    work_.push_back(std::move(work));
    changed_.notify_all();
    return ++pushed_;
  }

  uint64_t pushed() {
    std::lock_guard<std::mutex> lock(mutex_);
    return pushed_;
  }

  bool is_done(uint64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_ >= number;
  }

  void wait(uint64_t number) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= number; });
  }

  void synchronize() {
    uint64_t number = pushed();
    WithoutPython without;
    wait(number);
  }

  const int priority;

 private:
  [[noreturn]] void run() {
    int delay = microseconds(delay_);  // a forked process has its own
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return !work_.empty(); });
      auto work = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      if (delay) std::this_thread::sleep_for(std::chrono::microseconds(delay));
      work();
      lock.lock();
      ++done_;
      changed_.notify_all();
    }
  }

  const char* const delay_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  uint64_t pushed_ = 0, done_ = 0;
};

struct Event {
  Stream* stream = nullptr;
  uint64_t number = 0;  // of the stream's work
};

// Never freed, since threads use them until the process is gone.
auto& mutex = *new std::mutex;
auto& on_device = *new std::map<uintptr_t, size_t>;
auto& on_host = *new std::map<uintptr_t, size_t>;
auto& default_stream = *new Stream(0, "SIMULATED_MAIN_DELAY");
auto& streams = *new std::vector<Stream*>{&default_stream};

Stream& stream_of(cudaStream_t stream) {
  return stream ? *reinterpret_cast<Stream*>(stream) : default_stream;
}

Event& event_of(cudaEvent_t event) { return *reinterpret_cast<Event*>(event); }

bool lies_in(const std::map<uintptr_t, size_t>& places, const void* pointer) {
  std::lock_guard<std::mutex> lock(mutex);
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto place = places.upper_bound(address);
  return place != places.begin() && address < (--place)->first + place->second;
}

cudaError_t allocate(std::map<uintptr_t, size_t>& places, void** pointer, size_t nbytes) {
  *pointer = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*pointer == MAP_FAILED) return cudaErrorMemoryAllocation;
  std::lock_guard<std::mutex> lock(mutex);
  places[reinterpret_cast<uintptr_t>(*pointer)] = nbytes;
  return cudaSuccess;
}

cudaError_t release(std::map<uintptr_t, size_t>& places, void* pointer) {
  std::lock_guard<std::mutex> lock(mutex);
  auto place = places.find(reinterpret_cast<uintptr_t>(pointer));
  if (place == places.end()) return cudaSuccess;
  munmap(pointer, place->second);
  places.erase(place);
  return cudaSuccess;
}

[[noreturn]] void refuse(const char* what) {
  fprintf(stderr, "simulated GPU: %s\n", what);
  fflush(stderr);
  abort();
}

}  // namespace

thread_local bool leaves_out_kernels = false;

cudaError_t launch_unknown() {
  if (leaves_out_kernels) return cudaSuccess;
  refuse("a kernel was launched that kernels.py did not take");
}

// Calls of threads that launch kernels. Other threads, such as NCCL's watchdog, call now and then.
thread_local bool launches = false;
std::map<std::string, long>& calls = *new std::map<std::string, long>;
std::mutex& calls_lock = *new std::mutex;

void count(const char* kind) {
  if (!launches) return;
  std::lock_guard<std::mutex> lock(calls_lock);
  ++calls[kind];
}

extern "C" {

// ------------------------------------------------------------ for kernels.py and nccl.cpp

void simulated_push(cudaStream_t stream, void (*function)(long), long number) {
  launches = true;
  count("launches");
  stream_of(stream).push([=] { function(number); });
}

// How many calls of a kind there were.
long simulated_calls(const char* kind) {
  std::lock_guard<std::mutex> lock(calls_lock);
  return calls[kind];
}

// What this thread launches from now on is left out: torch's barrier fills a tensor that nobody reads.
void simulated_leave_out_kernels(int leaves_out) { leaves_out_kernels = leaves_out; }

void simulated_call(cudaStream_t stream, std::function<void()>* work) {
  count("collectives");
  stream_of(stream).push([=] {
    (*work)();
    delete work;
  });
}

// ------------------------------------------------------------ memory

cudaError_t cudaMalloc(void** pointer, size_t nbytes) {
  count("allocations");
  return allocate(on_device, pointer, nbytes);
}

cudaError_t cudaFree(void* pointer) { return release(on_device, pointer); }

cudaError_t cudaHostAlloc(void** pointer, size_t nbytes, unsigned) {
  return allocate(on_host, pointer, nbytes);
}

cudaError_t cudaFreeHost(void* pointer) { return release(on_host, pointer); }

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = kMemory;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  *attributes = {};
  if (lies_in(on_device, pointer)) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->devicePointer = const_cast<void*>(pointer);
  } else if (lies_in(on_host, pointer)) {
    attributes->type = cudaMemoryTypeHost;
    attributes->hostPointer = const_cast<void*>(pointer);
  }
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(
    void* to, const void* from, size_t nbytes, cudaMemcpyKind, cudaStream_t stream) {
  count("copies");
  if (lies_in(on_device, from) || lies_in(on_host, from)) {
    stream_of(stream).push([=] { memcpy(to, from, nbytes); });
  } else {  // CUDA, too, has read memory that is not pinned when it returns
    auto copy = std::make_shared<std::string>(static_cast<const char*>(from), nbytes);
    stream_of(stream).push([=] { memcpy(to, copy->data(), nbytes); });
  }
  if (!lies_in(on_device, to) && !lies_in(on_host, to)) stream_of(stream).synchronize();
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t nbytes, cudaMemcpyKind kind) {
  cudaMemcpyAsync(to, from, nbytes, kind, nullptr);
  default_stream.synchronize();
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* pointer, int value, size_t nbytes, cudaStream_t stream) {
  stream_of(stream).push([=] { memset(pointer, value, nbytes); });
  return cudaSuccess;
}

// ------------------------------------------------------------ the device

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return device ? cudaErrorInvalidDevice : cudaSuccess; }

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  strcpy(properties->name, "simulated");
  properties->totalGlobalMem = kMemory;
  properties->major = 8;
  properties->multiProcessorCount = 1;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = kUnused;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int) {
  snprintf(id, length, "0000:00:00.0");
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> lock(mutex);
    all = streams;
  }
  for (auto* stream : all) stream->synchronize();
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the simulated GPU"; }
const char* cudaGetErrorName(cudaError_t) { return "simulated"; }

cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void** function, unsigned, unsigned long long,
    cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  if (result) *result = cudaDriverEntryPointSymbolNotFound;
  return cudaErrorNotSupported;
}

// ------------------------------------------------------------ streams and events

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -1;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  auto* created = new Stream(priority);
  std::lock_guard<std::mutex> lock(mutex);
  streams.push_back(created);
  *stream = reinterpret_cast<cudaStream_t>(created);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream).priority;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  count("host waits");
  stream_of(stream).synchronize();
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  count("queries");
  auto& queried = stream_of(stream);
  return queried.is_done(queried.pushed()) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*,
    const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &event_of(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  count("events recorded");
  event_of(event) = {&stream_of(stream), stream_of(stream).pushed()};
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  count("queries");
  auto [stream, number] = event_of(event);
  return !stream || stream->is_done(number) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  count("host waits");
  auto [stream, number] = event_of(event);
  WithoutPython without;
  if (stream) stream->wait(number);
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  count("stream waits");
  Event awaited = event_of(event);
  if (awaited.stream && awaited.stream != &stream_of(stream))
    stream_of(stream).push([=] { awaited.stream->wait(awaited.number); });
  return cudaSuccess;
}

// ------------------------------------------------------------ kernels

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}

void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(
    void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->binaryVersion = 80;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, cudaStream_t) { return 0; }

cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaSuccess; }

cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaSuccess; }

cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch_unknown();
}

cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch_unknown();
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
  return launch_unknown();
}

}  // extern "C"
