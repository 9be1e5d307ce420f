// What CUDA's headers want of a compiler; a package of its own has the real one.
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDART_CB
#define __align__(nbytes) __attribute__((aligned(nbytes)))
#define __builtin_align__(nbytes) __align__(nbytes)
#define __cudart_builtin__
#define __device__
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __forceinline__ inline
#define __host__
#define __inline__ inline
