// What nccl.h needs of it.
#include <cuda_runtime_api.h>
