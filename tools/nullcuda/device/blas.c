/* cuBLAS and cuBLASLt: products are counted; those of small matrices through cuBLASLt are computed, because
 * TransformerEngine asks for them below torch's operators, where values.py does not see them. */
#include "device.h"

#include <cublasLt.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void count_gemm(double rows, double columns, double inner) {
  pthread_mutex_lock(&lock);
  counters.gemms++;
  counters.gemm_flops += 2 * rows * columns * inner;
  pthread_mutex_unlock(&lock);
}

/* ---- cuBLAS: torch's own operators ask, and values.py computes ----------------------------------------------- */
typedef cublasStatus_t status_t;
#define DONE CUBLAS_STATUS_SUCCESS

PUBLIC status_t cublasCreate_v2(cublasHandle_t *out) { return *out = calloc(1, 64), DONE; }
PUBLIC status_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode) { return *mode = 0, DONE; }
PUBLIC status_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t *mode) { return *mode = 0, DONE; }
PUBLIC const char *cublasGetStatusString(status_t status) { return "a status of the null device"; }
PUBLIC status_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t a, cublasOperation_t b, int m, int n, int k,
                             const void *alpha, const void *A, cudaDataType ta, int lda, const void *B,
                             cudaDataType tb, int ldb, const void *beta, void *C, cudaDataType tc, int ldc,
                             cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
  return count_gemm(m, n, k), DONE;
}
PUBLIC status_t cublasSgemm_v2(cublasHandle_t handle, cublasOperation_t a, cublasOperation_t b, int m, int n, int k,
                               const float *alpha, const float *A, int lda, const float *B, int ldb,
                               const float *beta, float *C, int ldc) {
  return count_gemm(m, n, k), DONE;
}
PUBLIC status_t cublasDgemm_v2(cublasHandle_t handle, cublasOperation_t a, cublasOperation_t b, int m, int n, int k,
                               const double *alpha, const double *A, int lda, const double *B, int ldb,
                               const double *beta, double *C, int ldc) {
  return count_gemm(m, n, k), DONE;
}
PUBLIC status_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t a, cublasOperation_t b, int m, int n,
                                           int k, const void *alpha, const void *A, cudaDataType ta, int lda,
                                           long long step_a, const void *B, cudaDataType tb, int ldb,
                                           long long step_b, const void *beta, void *C, cudaDataType tc, int ldc,
                                           long long step_c, int batches, cublasComputeType_t compute,
                                           cublasGemmAlgo_t algorithm) {
  return count_gemm((double)m * batches, n, k), DONE;
}
PUBLIC status_t cublasSgemmStridedBatched(cublasHandle_t handle, cublasOperation_t a, cublasOperation_t b, int m, int n,
                                          int k, const float *alpha, const float *A, int lda, long long step_a,
                                          const float *B, int ldb, long long step_b, const float *beta, float *C,
                                          int ldc, long long step_c, int batches) {
  return count_gemm((double)m * batches, n, k), DONE;
}

/* ---- cuBLASLt ------------------------------------------------------------------------------------------------ */
typedef struct { int type, batches; uint64_t rows, columns; int64_t leading, step; } layout_t;
typedef struct {
  int compute, scale_type, transpose_a, transpose_b, epilogue, pointer_mode, bias_type;
  const void *bias;
  scales_t scales_a, scales_b;
} description_t;

/* Opaque structures: the header's are of uint64_t's; torch and TransformerEngine let the library fill them. */
static layout_t *layout(cublasLtMatrixLayout_t opaque) { return (layout_t *)opaque; }
static description_t *description(cublasLtMatmulDesc_t opaque) { return (description_t *)opaque; }

PUBLIC status_t cublasLtCreate(cublasLtHandle_t *out) { return *out = calloc(1, 64), DONE; }
PUBLIC size_t cublasLtGetVersion(void) { return 130100; }
PUBLIC status_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t out, size_t bytes, cudaDataType type,
                                                  uint64_t rows, uint64_t columns, int64_t leading) {
  memset(out, 0, bytes);
  *layout(out) = (layout_t){(int)type, 1, rows, columns, leading, 0};
  return DONE;
}
PUBLIC status_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *out, cudaDataType type, uint64_t rows,
                                           uint64_t columns, int64_t leading) {
  *out = malloc(sizeof **out);
  return cublasLtMatrixLayoutInit_internal(*out, sizeof **out, type, rows, columns, leading);
}
PUBLIC status_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t given) { return free(given), DONE; }
PUBLIC status_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t to, cublasLtMatrixLayoutAttribute_t name,
                                                 const void *value, size_t bytes) {
  if (name == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) layout(to)->batches = *(const int32_t *)value;
  if (name == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET) layout(to)->step = *(const int64_t *)value;
  return DONE;
}
PUBLIC status_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t out, size_t bytes, cublasComputeType_t compute,
                                                cudaDataType scale) {
  memset(out, 0, bytes);
  *description(out) = (description_t){.compute = compute, .scale_type = scale, .epilogue = CUBLASLT_EPILOGUE_DEFAULT, .bias_type = -1};
  return DONE;
}
PUBLIC status_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *out, cublasComputeType_t compute, cudaDataType scale) {
  *out = malloc(sizeof **out);
  return cublasLtMatmulDescInit_internal(*out, sizeof **out, compute, scale);
}
PUBLIC status_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t given) { return free(given), DONE; }
PUBLIC status_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t to, cublasLtMatmulDescAttributes_t name,
                                               const void *value, size_t bytes) {
  description_t *at = description(to);
  switch (name) {
    case CUBLASLT_MATMUL_DESC_TRANSA: at->transpose_a = *(const int32_t *)value != CUBLAS_OP_N; break;
    case CUBLASLT_MATMUL_DESC_TRANSB: at->transpose_b = *(const int32_t *)value != CUBLAS_OP_N; break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE: at->epilogue = (int)*(const uint32_t *)value; break;
    case CUBLASLT_MATMUL_DESC_POINTER_MODE: at->pointer_mode = *(const int32_t *)value; break;
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: at->bias = *(const void *const *)value; break;
    case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER: at->scales_a.at = *(const float *const *)value; break;
    case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER: at->scales_b.at = *(const float *const *)value; break;
    case CUBLASLT_MATMUL_DESC_A_SCALE_MODE: at->scales_a.mode = *(const int32_t *)value; break;
    case CUBLASLT_MATMUL_DESC_B_SCALE_MODE: at->scales_b.mode = *(const int32_t *)value; break;
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: at->bias_type = *(const int32_t *)value; break;
    default: break;
  }
  return DONE;
}
PUBLIC status_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t out, size_t bytes) {
  return memset(out, 0, bytes), DONE;
}
PUBLIC status_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *out) { return *out = calloc(1, sizeof **out), DONE; }
PUBLIC status_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t given) { return free(given), DONE; }
PUBLIC status_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t how,
                                               cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                               cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                               cublasLtMatmulPreference_t preference, int wanted,
                                               cublasLtMatmulHeuristicResult_t *out, int *found) {
  memset(out, 0, sizeof *out);
  out->wavesCount = 1;
  return *found = 1, DONE;
}

static int is_fp8(int type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }

/* Kinds of scales that a Hopper has, but for rows of a whole factor, which nothing here asks for. */
static int is_known(const scales_t *scales) {
  return !scales->at || scales->mode == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F ||
         scales->mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F || scales->mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
}

/* Of row `i` (of `rows`) at place `l` of the sum (of `inner`); rows and blocks of scales are padded to four. */
static float scale_at(const scales_t *scales, long i, long rows, long l, long inner) {
  if (!scales->at) return 1;
  if (scales->mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F) return scales->at[l / 128 * ((rows + 3) / 4 * 4) + i];
  if (scales->mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F)
    return scales->at[i / 128 * (((inner + 127) / 128 + 3) / 4 * 4) + l / 128];
  return scales->at[0];
}

int multiply(const product_t *p) {
  if (!number_bytes(p->type_a) || !number_bytes(p->type_b) || !number_bytes(p->type_c) || is_fp8(p->type_c)) return 0;
  if (!is_known(&p->scales_a) || !is_known(&p->scales_b)) return 0;
  float *a = malloc(sizeof(float) * (size_t)(p->m * p->k + 1)), *b = malloc(sizeof(float) * (size_t)(p->k * p->n + 1));
  for (long i = 0; i < p->m; i++) /* rows of op(A), contiguous */
    for (long j = 0; j < p->k; j++)
      a[i * p->k + j] = (float)number_at(p->a, p->transpose_a ? j + i * p->lda : i + j * p->lda, p->type_a) *
                        scale_at(&p->scales_a, i, p->m, j, p->k);
  for (long j = 0; j < p->n; j++) /* columns of op(B), contiguous */
    for (long i = 0; i < p->k; i++)
      b[j * p->k + i] = (float)number_at(p->b, p->transpose_b ? j + i * p->ldb : i + j * p->ldb, p->type_b) *
                        scale_at(&p->scales_b, j, p->n, i, p->k);
  for (long j = 0; j < p->n; j++)
    for (long i = 0; i < p->m; i++) {
      double total = 0;
      const float *left = a + i * p->k, *right = b + j * p->k;
      for (long l = 0; l < p->k; l++) total += (double)left[l] * right[l];
      double before = p->beta != 0 ? p->beta * number_at(p->c, i + j * p->ldc, p->type_c) : 0;
      set_number(p->d, i + j * p->ldc, p->type_c, p->alpha * total + before);
    }
  free(a);
  free(b);
  return 1;
}

/* The bias that a product adds to its rows, or the gradient of one that it sums over the columns of its second factor. */
static void epilogue(const description_t *how, const product_t *p) {
  int type = how->bias_type >= 0 ? how->bias_type : p->type_c;
  if (!how->bias) return;
  if (how->epilogue == CUBLASLT_EPILOGUE_BIAS)
    for (long i = 0; i < p->m; i++)
      for (long j = 0; j < p->n; j++)
        set_number(p->d, i + j * p->ldc, p->type_c,
                   number_at(p->d, i + j * p->ldc, p->type_c) + number_at(how->bias, i, type));
  if (how->epilogue == CUBLASLT_EPILOGUE_BGRADB)
    for (long j = 0; j < p->n; j++) {
      double total = 0;
      for (long i = 0; i < p->k; i++) total += number_at(p->b, p->transpose_b ? j + i * p->ldb : i + j * p->ldb, p->type_b);
      set_number((void *)how->bias, j, type, total);
    }
}

PUBLIC status_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t opaque, const void *alpha, const void *A,
                               cublasLtMatrixLayout_t la, const void *B, cublasLtMatrixLayout_t lb, const void *beta,
                               const void *C, cublasLtMatrixLayout_t lc, void *D, cublasLtMatrixLayout_t ld,
                               const cublasLtMatmulAlgo_t *algorithm, void *workspace, size_t bytes, cudaStream_t stream) {
  description_t *how = description(opaque);
  layout_t *a = layout(la), *b = layout(lb), *d = layout(ld);
  long inner = (long)(how->transpose_a ? a->rows : a->columns);
  count_gemm((double)d->rows * d->batches, (double)d->columns, (double)inner);
  COUNT(launches, 1);
  if (8 * (a->rows * a->columns + b->rows * b->columns + d->rows * d->columns) * d->batches > 3 * true_bytes()) return DONE;
  int wide = how->scale_type == CUDA_R_64F;
  product_t p = {.type_a = a->type, .type_b = b->type, .type_c = d->type, .transpose_a = how->transpose_a,
                 .transpose_b = how->transpose_b, .m = (long)d->rows, .n = (long)d->columns, .k = inner,
                 .lda = a->leading, .ldb = b->leading, .ldc = d->leading,
                 .alpha = wide ? *(const double *)alpha : *(const float *)alpha,
                 .beta = wide ? *(const double *)beta : *(const float *)beta,
                 .scales_a = how->scales_a, .scales_b = how->scales_b};
  for (int i = 0; i < d->batches; i++) {
    p.a = (const char *)A + i * a->step * number_bytes(a->type);
    p.b = (const char *)B + i * b->step * number_bytes(b->type);
    p.c = (const char *)C + i * layout(lc)->step * number_bytes(d->type);
    p.d = (char *)D + i * d->step * number_bytes(d->type);
    if (!multiply(&p)) break;
    epilogue(how, &p);
  }
  return DONE;
}
