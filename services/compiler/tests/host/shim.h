// Runs a kernel in CUDA C on the host. A thread of the host is a thread of a block; blocks run one after another.
// A kernel's threads must all reach each of its barriers.
#include <pthread.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static
#define __syncthreads() pthread_barrier_wait(&host_barrier)

struct HostIndex {
  unsigned x = 0, y = 0, z = 0;
};
static thread_local HostIndex threadIdx, blockIdx;
static pthread_barrier_t host_barrier;

template <class To, class From> static To host_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
static inline float __int_as_float(int bits) { return host_bits<float>(bits); }
static inline double __longlong_as_double(long long bits) { return host_bits<double>(bits); }

template <class T, class Change> static T host_atomic(T* at, Change change) {
  T old;
  __atomic_load(at, &old, __ATOMIC_RELAXED);
  for (;;) {
    T now = change(old);
    if (__atomic_compare_exchange(at, &old, &now, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return old;
  }
}
template <class T, class V> static T atomicAdd(T* at, V v) {
  return host_atomic(at, [v](T old) { return (T)(old + (T)v); });
}
template <class T, class V> static T atomicMax(T* at, V v) {
  return host_atomic(at, [v](T old) { return old < (T)v ? (T)v : old; });
}
template <class T, class V> static T atomicMin(T* at, V v) {
  return host_atomic(at, [v](T old) { return old > (T)v ? (T)v : old; });
}
template <class T, class V> static T atomicExch(T* at, V v) {
  return host_atomic(at, [v](T) { return (T)v; });
}

static void host_launch(unsigned groups, unsigned threads, const std::function<void()>& kernel) {
  pthread_barrier_init(&host_barrier, nullptr, threads);
  std::vector<std::thread> running;
  for (unsigned t = 0; t < threads; t++) {
    running.emplace_back([=, &kernel] {
      for (unsigned g = 0; g < groups; g++) {
        threadIdx.x = t;
        blockIdx.x = g;
        kernel();
        __syncthreads();
      }
    });
  }
  for (std::thread& thread : running) thread.join();
  pthread_barrier_destroy(&host_barrier);
}

// An array of exactly as many bytes as the kernel may use, so that a sanitizer sees accesses past its end.
struct HostArray {
  size_t size;
  void* memory;
  explicit HostArray(size_t bytes) : size(bytes), memory(std::malloc(bytes ? bytes : 1)) {
    if (std::fread(memory, 1, size, stdin) != size) std::abort();
  }
  ~HostArray() {
    std::fwrite(memory, 1, size, stdout);
    std::free(memory);
  }
};
template <class T> static T host_scalar() {
  T found;
  if (std::fread(&found, sizeof(found), 1, stdin) != 1) std::abort();
  return found;
}
