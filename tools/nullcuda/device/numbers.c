/* Numbers as the device stores them. */
#include "device.h"

#include <library_types.h>
#include <math.h>
#include <string.h>

static float from_half(uint16_t bits) {
  uint32_t sign = (uint32_t)(bits >> 15) << 31, exponent = (bits >> 10) & 31, fraction = bits & 1023, out;
  float value;
  if (exponent == 0) {
    value = (float)fraction * 0x1p-24f;
    return sign ? -value : value;
  }
  out = sign | (exponent == 31 ? 255u << 23 : (exponent + 112) << 23) | fraction << 13;
  memcpy(&value, &out, 4);
  return value;
}

static float from_e4m3(uint8_t bits) { /* bias 7, no infinity, 0x7f is no number */
  int exponent = (bits >> 3) & 15, fraction = bits & 7;
  float value = exponent ? ldexpf((float)(8 + fraction), exponent - 10) : (float)fraction * 0x1p-9f;
  if ((bits & 0x7f) == 0x7f) value = NAN;
  return bits >> 7 ? -value : value;
}

static uint16_t to_half(float value) { return (union { _Float16 half; uint16_t bits; }){(_Float16)value}.bits; }

static float from_bfloat(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

static uint16_t to_bfloat(float value) { /* to nearest, ties to even */
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

int number_bytes(int type) {
  switch (type) {
    case CUDA_R_64F: case CUDA_R_64I: case CUDA_R_64U: return 8;
    case CUDA_R_32F: case CUDA_R_32I: case CUDA_R_32U: return 4;
    case CUDA_R_16F: case CUDA_R_16BF: return 2;
    case CUDA_R_8I: case CUDA_R_8U: case CUDA_R_8F_E4M3: case CUDA_R_8F_E5M2: return 1;
    default: return 0;
  }
}

double number_at(const void *array, long i, int type) {
  switch (type) {
    case CUDA_R_64F: return ((const double *)array)[i];
    case CUDA_R_32F: return ((const float *)array)[i];
    case CUDA_R_16F: return from_half(((const uint16_t *)array)[i]);
    case CUDA_R_16BF: return from_bfloat(((const uint16_t *)array)[i]);
    case CUDA_R_64I: return (double)((const int64_t *)array)[i];
    case CUDA_R_64U: return (double)((const uint64_t *)array)[i];
    case CUDA_R_32I: return ((const int32_t *)array)[i];
    case CUDA_R_32U: return ((const uint32_t *)array)[i];
    case CUDA_R_8I: return ((const int8_t *)array)[i];
    case CUDA_R_8F_E4M3: return from_e4m3(((const uint8_t *)array)[i]);
    case CUDA_R_8F_E5M2: return from_half((uint16_t)(((const uint8_t *)array)[i] << 8));
    default: return ((const uint8_t *)array)[i];
  }
}

void set_number(void *array, long i, int type, double value) {
  switch (type) {
    case CUDA_R_64F: ((double *)array)[i] = value; break;
    case CUDA_R_32F: ((float *)array)[i] = (float)value; break;
    case CUDA_R_16F: ((uint16_t *)array)[i] = to_half((float)value); break;
    case CUDA_R_16BF: ((uint16_t *)array)[i] = to_bfloat((float)value); break;
    case CUDA_R_64I: ((int64_t *)array)[i] = (int64_t)value; break;
    case CUDA_R_64U: ((uint64_t *)array)[i] = (uint64_t)value; break;
    case CUDA_R_32I: ((int32_t *)array)[i] = (int32_t)value; break;
    case CUDA_R_32U: ((uint32_t *)array)[i] = (uint32_t)value; break;
    case CUDA_R_8I: ((int8_t *)array)[i] = (int8_t)value; break;
    default: ((uint8_t *)array)[i] = (uint8_t)value; break;
  }
}
