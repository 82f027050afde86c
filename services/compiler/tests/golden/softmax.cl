#pragma OPENCL FP_CONTRACT OFF
#ifdef __clang__
#define F32(name) __builtin_##name##f
#define F64(name) __builtin_##name
#else
#define F32(name) name
#define F64(name) name
#endif

static inline float wooly_exp(float x) {
  const float v5 = F32(fma)(x, 1.4426950216293335f, 12582912.0f);
  const float v7 = v5 - 12582912.0f;
  const float v14 = F32(fma)(v7, 0.00021219444170128554f, F32(fma)(v7, -0.693359375f, x));
  return (x <= 88.72283172607422f) ? ((x < (-87.33654022216797f)) ? 0.0f : (as_float((int)((uint)(as_int(F32(fma)(F32(fma)(F32(fma)(F32(fma)(F32(fma)(F32(fma)(F32(fma)(0.00019739456183742732f, v14, 0.0013935083989053965f), v14, 0.008333571255207062f), v14, 0.041666463017463684f), v14, 0.1666666567325592f), v14, 0.5f), v14, 1.0f), v14, 1.0f))) + (uint)((int)((uint)((int)((uint)(as_int(v5)) - (uint)1262485504)) << (23 & 31))))))) : (x + INFINITY);
}

kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void k_softmax(global const float* restrict in0, global float* restrict out1) {
  float row0[300];
  const long g = (long)get_group_id(0) * 9L;
  const long end = (g + 9L < 64L ? g + 9L : 64L);
  for (long p = g; p < end; ++p) {
    const long v0 = p;
    float a2[128];
    for (long l = 0; l < 128; ++l) { a2[l] = -INFINITY; }
    for (long j = 0; j < 256L; j += 128) {
      for (long l = 0; l < 128; ++l) {
        const long v3 = j + l;
        const float v7 = in0[(v0 * 300L) + v3];
        a2[l] = a2[l] != a2[l] ? a2[l] : (a2[l] > v7 ? a2[l] : v7);
      }
    }
    for (long l = 0; l < 44; ++l) {
      const long v3 = 256L + l;
      const float v7 = in0[(v0 * 300L) + v3];
      a2[l] = a2[l] != a2[l] ? a2[l] : (a2[l] > v7 ? a2[l] : v7);
    }
    for (long d = 64; d > 0; d >>= 1) {
      for (long l = 0; l < d; ++l) {
        a2[l] = a2[l] != a2[l] ? a2[l] : (a2[l] > a2[l + d] ? a2[l] : a2[l + d]);
      }
    }
    const float v2 = a2[0];
    float a12[128];
    for (long l = 0; l < 128; ++l) { a12[l] = 0.0f; }
    for (long j = 0; j < 256L; j += 128) {
      for (long l = 0; l < 128; ++l) {
        const long v13 = j + l;
        const float v17 = in0[(v0 * 300L) + v13];
        const float v19 = wooly_exp(v17 - v2);
        row0[v13] = v19;
        a12[l] = a12[l] + v19;
      }
    }
    for (long l = 0; l < 44; ++l) {
      const long v13 = 256L + l;
      const float v17 = in0[(v0 * 300L) + v13];
      const float v19 = wooly_exp(v17 - v2);
      row0[v13] = v19;
      a12[l] = a12[l] + v19;
    }
    for (long d = 64; d > 0; d >>= 1) {
      for (long l = 0; l < d; ++l) {
        a12[l] = a12[l] + a12[l + d];
      }
    }
    const float v12 = a12[0];
    const float v24 = 1.0f / v12;
    for (long v25 = 0; v25 < 300L; ++v25) {
      const float v26 = row0[v25];
      out1[(v0 * 300L) + v25] = v26 * v24;
    }
  }
}
