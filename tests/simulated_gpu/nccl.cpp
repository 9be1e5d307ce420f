// NCCL as torch's process group uses it: ranks meet through files, when their streams come to a
// collective. See __init__.py.

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <sys/stat.h>
#include <thread>
#include <tuple>
#include <unistd.h>
#include <vector>

extern "C" void simulated_call(cudaStream_t stream, std::function<void()>* work);

namespace {

using namespace std::chrono_literals;

std::chrono::seconds patience() {
  const char* value = getenv("SIMULATED_PATIENCE");
  return std::chrono::seconds(value ? atoi(value) : 60);
}

using Flag = std::shared_ptr<std::atomic<bool>>;

struct Comm {
  std::string folder;
  int size, rank;
  Flag aborted = std::make_shared<std::atomic<bool>>(false);
  long begun = 0, splits = 0;  // collectives, and groups made of it
};

using Parts = std::vector<std::string>;

Comm& comm_of(ncclComm_t comm) { return *reinterpret_cast<Comm*>(comm); }

[[noreturn]] void fail(const std::string& why) {
  fprintf(stderr, "simulated NCCL: %s\n", why.c_str());
  fflush(stderr);
  _exit(1);
}

void write(const std::string& path, const void* data, size_t nbytes) {
  std::ofstream(path + ".part", std::ios::binary).write(static_cast<const char*>(data), nbytes);
  rename((path + ".part").c_str(), path.c_str());
}

// Waits until `is_true`, as NCCL's kernels do: for ever, or until the communicator is aborted.
// Returns whether it is true.
bool wait_until(const Flag& aborted, const std::string& what, std::function<bool()> is_true) {
  auto begin = std::chrono::steady_clock::now();
  while (!is_true()) {
    if (*aborted) return false;
    auto waited = std::chrono::steady_clock::now() - begin;
    if (waited > patience()) fail("nobody came to " + what);
    // The longer a wait, the more of the CPU it leaves to others.
    std::this_thread::sleep_for(std::clamp<std::chrono::nanoseconds>(waited / 10, 100us, 5ms));
  }
  return true;
}

std::string read(const Flag& aborted, const std::string& path) {
  std::string found;
  wait_until(aborted, path, [&] {
    std::ifstream file(path, std::ios::binary | std::ios::ate);
    if (!file) return false;
    found.resize(file.tellg());
    file.seekg(0).read(found.data(), found.size());
    return true;
  });
  return found;
}

// Every rank's `send`, given to `done` when the stream has come so far. Not if the communicator is
// aborted before. As with NCCL, ranks that send different numbers of bytes wait until then.
ncclResult_t meet(
    ncclComm_t handle, cudaStream_t stream, const void* send, size_t nbytes,
    std::function<void(const Parts&)> done) {
  auto& comm = comm_of(handle);
  long number = comm.begun++;
  auto path = [folder = comm.folder](long number, int rank) {
    return folder + "/" + std::to_string(number) + "." + std::to_string(rank);
  };
  auto [size, rank, aborted] = std::tuple(comm.size, comm.rank, comm.aborted);
  simulated_call(stream, new std::function<void()>([=, size = size, rank = rank, aborted = aborted] {
    if (*aborted) return;
    write(path(number, rank), send, nbytes);
    Parts parts;
    for (int peer = 0; peer < size; ++peer) {
      parts.push_back(read(aborted, path(number, peer)));
      bool is_alike = parts.back().size() == nbytes;
      if (!wait_until(aborted, "an abort", [=] { return is_alike; })) return;
    }
    unlink(path(number - 1, rank).c_str());  // all ranks have read it: they are at this one
    done(parts);
  }));
  return ncclSuccess;
}

size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclFloat64: case ncclInt64: case ncclUint64: return 8;
    case ncclFloat32: case ncclInt32: case ncclUint32: return 4;
    case ncclFloat16: case ncclBfloat16: return 2;
    default: return 1;
  }
}

struct Bfloat16 {
  uint16_t bits = 0;
  Bfloat16() = default;
  explicit Bfloat16(float value) {  // to the nearest, ties to even
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    bits = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
  }
  explicit operator float() const {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
};

template <class T, class Wide>
void reduce(void* out, const Parts& parts, size_t offset, size_t count, ncclRedOp_t op) {
  for (size_t i = 0; i < count; ++i) {
    Wide total{};
    for (size_t rank = 0; rank < parts.size(); ++rank) {
      T element;
      memcpy(&element, parts[rank].data() + (offset + i) * sizeof(T), sizeof(T));
      Wide value = static_cast<Wide>(element);
      if (rank == 0) total = value;
      else if (op == ncclMax) total = value > total ? value : total;
      else if (op == ncclMin) total = value < total ? value : total;
      else total = total + value;
    }
    if (op == ncclAvg) total = total / static_cast<Wide>(parts.size());
    T element = static_cast<T>(total);
    memcpy(static_cast<char*>(out) + i * sizeof(T), &element, sizeof(T));
  }
}

void reduce(
    void* out, const Parts& parts, size_t offset, size_t count, ncclDataType_t type,
    ncclRedOp_t op) {
  if (op != ncclSum && op != ncclAvg && op != ncclMax && op != ncclMin)
    fail("no reduction by operation " + std::to_string(op));
  switch (type) {
    case ncclFloat64: return reduce<double, double>(out, parts, offset, count, op);
    case ncclFloat32: return reduce<float, float>(out, parts, offset, count, op);
    case ncclBfloat16: return reduce<Bfloat16, float>(out, parts, offset, count, op);
    case ncclInt64: return reduce<int64_t, int64_t>(out, parts, offset, count, op);
    case ncclInt32: return reduce<int32_t, int32_t>(out, parts, offset, count, op);
    case ncclUint8: return reduce<uint8_t, uint8_t>(out, parts, offset, count, op);
    default: fail("no reduction of type " + std::to_string(type));
  }
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  *id = {};
  snprintf(id->internal, sizeof id->internal, "%s/XXXXXX", getenv("SIMULATED_NCCL_FOLDER"));
  return mkdtemp(id->internal) ? ncclSuccess : ncclSystemError;
}

ncclResult_t ncclCommInitRankConfig(
    ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
  *comm = reinterpret_cast<ncclComm_t>(new Comm{id.internal, size, rank});
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, size, id, rank, nullptr);
}

// Where the ranks have ended up that are alike in `color`, in the order of `key`.
ncclResult_t ncclCommSplit(
    ncclComm_t handle, int color, int key, ncclComm_t* out, ncclConfig_t*) {
  auto& comm = comm_of(handle);
  std::string base = comm.folder + "/split" + std::to_string(comm.splits++);
  int own[] = {color, key};
  write(base + "." + std::to_string(comm.rank), own, sizeof own);
  std::vector<std::pair<int, int>> members;
  for (int peer = 0; peer < comm.size; ++peer) {
    int told[2];
    memcpy(told, read(comm.aborted, base + "." + std::to_string(peer)).data(), sizeof told);
    if (told[0] == color) members.emplace_back(told[1], peer);
  }
  *out = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  std::sort(members.begin(), members.end());
  auto place = std::find(members.begin(), members.end(), std::pair(key, comm.rank));
  std::string folder = base + "-" + std::to_string(color);
  mkdir(folder.c_str(), 0700);
  *out = reinterpret_cast<ncclComm_t>(
      new Comm{folder, int(members.size()), int(place - members.begin())});
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = comm_of(comm).size;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm_of(comm).rank;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t, int* device) {
  *device = 0;
  return ncclSuccess;
}

ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** handle) {
  *handle = nullptr;
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclSuccess; }

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  *comm_of(comm).aborted = true;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclGroupStart() { return ncclSuccess; }
ncclResult_t ncclGroupEnd() { return ncclSuccess; }
const char* ncclGetErrorString(ncclResult_t) { return "an error of the simulated NCCL"; }
const char* ncclGetLastError(ncclComm_t) { return "an error of the simulated NCCL"; }

ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclAllGather(
    const void* send, void* out, size_t count, ncclDataType_t type, ncclComm_t comm,
    cudaStream_t stream) {
  size_t nbytes = count * size_of(type);
  return meet(comm, stream, send, nbytes, [=](const Parts& parts) {
    for (size_t rank = 0; rank < parts.size(); ++rank)
      memcpy(static_cast<char*>(out) + rank * nbytes, parts[rank].data(), nbytes);
  });
}

ncclResult_t ncclReduceScatter(
    const void* send, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
    cudaStream_t stream) {
  auto [size, rank] = std::pair(comm_of(comm).size, comm_of(comm).rank);
  return meet(comm, stream, send, count * size * size_of(type), [=](const Parts& parts) {
    reduce(out, parts, rank * count, count, type, op);
  });
}

ncclResult_t ncclAllReduce(
    const void* send, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
    cudaStream_t stream) {
  return meet(comm, stream, send, count * size_of(type), [=](const Parts& parts) {
    reduce(out, parts, 0, count, type, op);
  });
}

ncclResult_t ncclBroadcast(
    const void* send, void* out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
    cudaStream_t stream) {
  size_t nbytes = count * size_of(type);
  const void* own = comm_of(comm).rank == root ? send : out;
  return meet(comm, stream, own, nbytes, [=](const Parts& parts) {
    memcpy(out, parts[root].data(), nbytes);
  });
}

ncclResult_t ncclAlltoAll(
    const void* send, void* out, size_t count, ncclDataType_t type, ncclComm_t comm,
    cudaStream_t stream) {
  size_t nbytes = count * size_of(type);
  int own = comm_of(comm).rank;
  return meet(comm, stream, send, nbytes * comm_of(comm).size, [=](const Parts& parts) {
    for (size_t rank = 0; rank < parts.size(); ++rank)
      memcpy(static_cast<char*>(out) + rank * nbytes, parts[rank].data() + own * nbytes, nbytes);
  });
}

}  // extern "C"
