"""The C functions that lowered kernels call. They have no undefined behaviour, and compilers can vectorize them.

Products and sums are contracted only where a pragma allows it. PoCL's `fma` is a call, which prevents vectorized loops.
"""

from __future__ import annotations

from typing import Final

PRELUDE: Final = r"""
#pragma OPENCL FP_CONTRACT OFF
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#pragma OPENCL EXTENSION cl_khr_int64_base_atomics : enable
#pragma OPENCL EXTENSION cl_khr_int64_extended_atomics : enable
#define W_END (*(volatile global int *)wooly_status)
#define W_BAD(kind, place) do { wooly_status[2] = (place); wooly_status[1] = (kind); } while (0)

static inline int w_divs_i32(int a, int b) {
  int d = (b == 0 || b == -1) ? 1 : b;
  int q = a / d;
  return b == 0 ? 0 : b == -1 ? (int)(0u - (uint)a) : q;
}
static inline int w_rems_i32(int a, int b) { int d = (b == 0 || b == -1) ? 1 : b; return a % d; }
static inline int w_divu_i32(uint a, uint b) { return b == 0 ? 0 : (int)(a / (b == 0 ? 1 : b)); }
static inline int w_remu_i32(uint a, uint b) { return b == 0 ? 0 : (int)(a % (b == 0 ? 1 : b)); }
static inline long w_divs_i64(long a, long b) {
  long d = (b == 0 || b == -1) ? 1 : b;
  long q = a / d;
  return b == 0 ? 0 : b == -1 ? (long)(0ul - (ulong)a) : q;
}
static inline long w_rems_i64(long a, long b) { long d = (b == 0 || b == -1) ? 1 : b; return a % d; }
static inline long w_divu_i64(ulong a, ulong b) { return b == 0 ? 0 : (long)(a / (b == 0 ? 1 : b)); }
static inline long w_remu_i64(ulong a, ulong b) { return b == 0 ? 0 : (long)(a % (b == 0 ? 1 : b)); }

static inline int w_below(long first, long last, long end, int size) {
  const ulong n = (ulong)end - (ulong)first;
  return last < first ? -1 : end <= first ? 0 : n < (ulong)size ? (int)n : size;
}
static inline int w_up_to(long first, long last, long end, int size) {
  const ulong n = (ulong)end - (ulong)first;
  return last < first ? -1 : end < first ? 0 : n < (ulong)size ? (int)n + 1 : size;
}

static inline int w_f32_to_i32(float x) {
  float c = x >= 2147483648.0f || !(x >= -2147483648.0f) ? 0.0f : x;
  int n = (int)c;
  return x >= 2147483648.0f ? 2147483647 : x < -2147483648.0f ? (int)0x80000000u : n;
}
static inline int w_f64_to_i32(double x) {
  double c = x >= 2147483648.0 || !(x > -2147483649.0) ? 0.0 : x;
  int n = (int)c;
  return x >= 2147483648.0 ? 2147483647 : x <= -2147483649.0 ? (int)0x80000000u : n;
}
static inline long w_f64_to_i64(double x) {
  double c = x >= 9223372036854775808.0 || !(x >= -9223372036854775808.0) ? 0.0 : x;
  long n = (long)c;
  return x >= 9223372036854775808.0 ? 0x7fffffffffffffffl : x < -9223372036854775808.0 ? (long)0x8000000000000000ul : n;
}
static inline long w_f32_to_i64(float x) { return w_f64_to_i64((double)x); }
static inline ulong w_f64_to_u64(double x) {
  double c = x < 18446744073709551616.0 && x >= 0.0 ? x : 0.0;
  ulong n = (ulong)c;
  return x >= 18446744073709551616.0 ? 0xfffffffffffffffful : n;
}
static inline ulong w_f32_to_u64(float x) { return w_f64_to_u64((double)x); }

static inline float w_round_bf16(float x) {
  uint u = as_uint(x);
  uint r = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
  return as_float((u & 0x7fffffffu) > 0x7f800000u ? (u | 0x400000u) & 0xffff0000u : r);
}
static inline float w_bf16_of(ushort h) { return as_float((uint)h << 16); }
static inline ushort w_bf16_bits(float x) { return (ushort)(as_uint(x) >> 16); }
static inline float w_round_f16(float x) {
  uint u = as_uint(x), s = u & 0x80000000u, a = u & 0x7fffffffu;
  uint n = (a + 0xfffu + ((a >> 13) & 1u)) & 0xffffe000u;
  uint t = as_uint((as_float(a) + 0.5f) - 0.5f);
  uint r = a < 0x38800000u ? t : n >= 0x47800000u ? 0x7f800000u : n;
  return as_float(s | (a > 0x7f800000u ? 0x7fc00000u : r));
}
static inline float w_f16_of(ushort h) {
  uint s = ((uint)h & 0x8000u) << 16, a = (uint)h & 0x7fffu;
  uint n = as_uint(as_float(a << 13) * 5192296858534827628530496329220096.0f);
  return as_float(s | (a >= 0x7c00u ? 0x7f800000u | (a & 0x3ffu) << 13 : n));
}
static inline ushort w_f16_bits(float x) {
  uint u = as_uint(x), s = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  uint n = (a >> 13) - (112u << 10);
  uint t = as_uint(as_float(a < 0x38800000u ? a : 0u) + 0.5f) - 0x3f000000u;
  uint r = a < 0x38800000u ? t : a > 0x7f800000u ? 0x7e00u : a >= 0x47800000u ? 0x7c00u : n;
  return (ushort)(s | r);
}

static inline float w_round_f8E4M3FN(float x) {
  uint u = as_uint(x), s = u & 0x80000000u, a = u & 0x7fffffffu;
  uint n = (a + 0x7ffffu + ((a >> 20) & 1u)) & 0xfff00000u;
  uint t = as_uint((as_float(a) + 16384.0f) - 16384.0f);
  uint r = a < 0x3c800000u ? t : n > 0x43e00000u ? 0x43e00000u : n;
  return as_float(s | (a > 0x7f800000u ? 0x7fc00000u : r));
}
static inline float w_f8E4M3FN_of(uchar h) {
  uint s = ((uint)h & 0x80u) << 24, a = (uint)h & 0x7fu;
  uint n = as_uint(as_float(a << 20) * 1329227995784915872903807060280344576.0f);
  return as_float(s | (a == 0x7fu ? 0x7fc00000u : n));
}
static inline uchar w_f8E4M3FN_bits(float x) {
  uint u = as_uint(x), s = (u >> 24) & 0x80u, a = u & 0x7fffffffu;
  uint t = as_uint(as_float(a < 0x3c800000u ? a : 0u) + 16384.0f) - 0x46800000u;
  uint r = a < 0x3c800000u ? t : a > 0x7f800000u ? 0x7fu : (a >> 20) - (120u << 3);
  return (uchar)(s | r);
}
static inline float w_round_f8E5M2(float x) {
  uint u = as_uint(x), s = u & 0x80000000u, a = u & 0x7fffffffu;
  uint n = (a + 0xfffffu + ((a >> 21) & 1u)) & 0xffe00000u;
  uint t = as_uint((as_float(a) + 128.0f) - 128.0f);
  uint r = a < 0x38800000u ? t : n > 0x47600000u ? 0x47600000u : n;
  return as_float(s | (a > 0x7f800000u ? 0x7fc00000u : r));
}
static inline float w_f8E5M2_of(uchar h) {
  uint s = ((uint)h & 0x80u) << 24, a = (uint)h & 0x7fu;
  uint n = as_uint(as_float(a << 21) * 5192296858534827628530496329220096.0f);
  return as_float(s | (a >= 0x7cu ? 0x7f800000u | (a & 3u) << 21 : n));
}
static inline uchar w_f8E5M2_bits(float x) {
  uint u = as_uint(x), s = (u >> 24) & 0x80u, a = u & 0x7fffffffu;
  uint t = as_uint(as_float(a < 0x38800000u ? a : 0u) + 128.0f) - 0x43000000u;
  uint r = a < 0x38800000u ? t : a > 0x7f800000u ? 0x7fu : a == 0x7f800000u ? 0x7cu : (a >> 21) - (112u << 2);
  return (uchar)(s | r);
}

static inline float w_scale2(float y, float t) {
  int n = (int)t, h = n >> 1;
  return y * as_float((uint)(h + 127) << 23) * as_float((uint)(n - h + 127) << 23);
}
static inline float w_exp_part(float r) {
#pragma OPENCL FP_CONTRACT ON
  float y = 1.9841270e-4f;
  y = y * r + 1.3888889e-3f;
  y = y * r + 8.3333333e-3f;
  y = y * r + 4.1666667e-2f;
  y = y * r + 1.6666667e-1f;
  y = y * r + 0.5f;
  y = y * r + 1.0f;
  return y * r + 1.0f;
}
static inline float w_exp(float x) {
#pragma OPENCL FP_CONTRACT ON
  float c = x > 89.0f ? 89.0f : x > -105.0f ? x : -105.0f;
  float t = c * 1.44269504f + 12582912.0f - 12582912.0f;
  float r = t * -0.693145752f + c;
  r = t * -1.42860677e-6f + r;
  float y = w_scale2(w_exp_part(r), t);
  return x != x ? x : y;
}
static inline float w_exp2(float x) {
#pragma OPENCL FP_CONTRACT ON
  float c = x > 129.0f ? 129.0f : x > -151.0f ? x : -151.0f;
  float t = (c + 12582912.0f) - 12582912.0f;
  float y = w_scale2(w_exp_part((c - t) * 0.693147181f), t);
  return x != x ? x : y;
}
static inline float __attribute__((overloadable)) w_tanh(float x) {
  return fabs(x) > 9.0109f ? copysign(1.0f, x) : tanh(x);
}
static inline double __attribute__((overloadable)) w_tanh(double x) { return tanh(x); }
static inline float w_add_f32(volatile global float *p, float x) {
  volatile global uint *q = (volatile global uint *)p;
  uint old = *q, seen;
  while ((seen = atomic_cmpxchg(q, old, as_uint(as_float(old) + x))) != old) old = seen;
  return as_float(old);
}
static inline uint w_half_swap(uint old, ushort now, int high) {
  return high ? (old & 0xffffu) | (uint)now << 16 : (old & 0xffff0000u) | now;
}
#define W_ADD_HALF(name) \
static inline float w_add_##name(volatile global ushort *p, float x) { \
  const int high = (int)(((ulong)p >> 1) & 1ul); \
  volatile global uint *q = (volatile global uint *)(p - high); \
  uint old = *q, seen; \
  for (;;) { \
    const float was = w_##name##_of((ushort)(high ? old >> 16 : old)); \
    const uint now = w_half_swap(old, w_##name##_bits(w_round_##name(was + x)), high); \
    if ((seen = atomic_cmpxchg(q, old, now)) == old) return was; \
    old = seen; \
  } \
}
W_ADD_HALF(f16)
W_ADD_HALF(bf16)
static inline double w_add_f64(volatile global double *p, double x) {
  volatile global ulong *q = (volatile global ulong *)p;
  ulong old = *q, seen;
  while ((seen = atom_cmpxchg(q, old, as_ulong(as_double(old) + x))) != old) old = seen;
  return as_double(old);
}
static inline float w_exch_f32(volatile global float *p, float x) {
  return as_float(atomic_xchg((volatile global uint *)p, as_uint(x)));
}
static inline double w_exch_f64(volatile global double *p, double x) {
  return as_double(atom_xchg((volatile global ulong *)p, as_ulong(x)));
}
"""
