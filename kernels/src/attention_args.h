// What both kernels of attention receive.
#pragma once
#include "device.cuh"

namespace sdonnx {

// A score that is masked, and the maximum of no scores: far below all sums of products of fp16, and finite, so that the
// difference of two of them is a number.
constexpr float kMasked = -1e30f;

struct AttentionArgs {
  const half *q, *k, *v;
  half* y;
  const int* counts;  // keys of each image that are not padding; null: all
  int batch, query_images, queries, keys, heads, head_size;  // query_images divides batch: the copies have one query
  float scale;  // times log2(e): the softmax takes powers of 2
  bool aligned;
};

// The first element of a head of a token, in a tensor (B,T,N*HEAD).
template <int HEAD>
__device__ __forceinline__ size_t row_offset(const AttentionArgs& a, int image, int length, int token, int head) {
  return ((size_t(image) * length + token) * a.heads + head) * HEAD;
}

}  // namespace sdonnx
