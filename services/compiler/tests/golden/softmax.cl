#pragma OPENCL FP_CONTRACT OFF

static inline float wooly_exp(float x) {
  const float v4 = (x < (-104.0f)) ? (-104.0f) : x;
  const float v8 = (v4 > 89.0f) ? 89.0f : v4;
  const float v12 = (v8 * 1.4426950216293335f) + 12582912.0f;
  const float v14 = v12 - 12582912.0f;
  const int v17 = (int)((uint)(as_int(v12)) - (uint)1262485504);
  const float v23 = (v8 - (v14 * 0.693359375f)) - (v14 * (-0.00021219444170128554f));
  const int v46 = (int)(v17 >> (1 & 31));
  return (((((v23 * v23) * ((((((((((0.00019739456183742732f * v23) + 0.0013935083989053965f) * v23) + 0.008333571255207062f) * v23) + 0.041666463017463684f) * v23) + 0.1666666567325592f) * v23) + 0.5f)) + v23) + 1.0f) * (as_float((int)((uint)((int)((uint)v46 + (uint)127)) << (23 & 31))))) * (as_float((int)((uint)((int)((uint)((int)((uint)v17 - (uint)v46)) + (uint)127)) << (23 & 31))));
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
        a2[l] = a2[l] != a2[l] || a2[l] > v7 ? a2[l] : v7;
      }
    }
    for (long l = 0; l < 44; ++l) {
      const long v3 = 256L + l;
      const float v7 = in0[(v0 * 300L) + v3];
      a2[l] = a2[l] != a2[l] || a2[l] > v7 ? a2[l] : v7;
    }
    for (long d = 64; d > 0; d >>= 1) {
      for (long l = 0; l < d; ++l) {
        a2[l] = a2[l] != a2[l] || a2[l] > a2[l + d] ? a2[l] : a2[l + d];
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
    for (long v23 = 0; v23 < 300L; ++v23) {
      const float v24 = row0[v23];
      out1[(v0 * 300L) + v23] = v24 / v12;
    }
  }
}
