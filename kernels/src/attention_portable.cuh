// Attention on mma.sync, for compute capability 8.0 and newer, in the manner of FlashAttention-2 (Dao 2023).
//
// A warp computes 16 queries of one head. Keys and values come in blocks: values are copied during the products of the
// scores, the next keys during those with the values.
//
// Head sizes are multiples of 8, so that nothing is padded: products take 16 columns at a time, and 8 at the end of an odd
// number of columns of 8. Rows in shared memory are an odd number of 16 bytes apart: eight rows are read without conflicts.
#pragma once
#include "attention_args.h"

namespace sdonnx {
namespace portable {

// A head of HEAD numbers in shared memory and in registers.
template <int HEAD>
struct Columns {
  static_assert(HEAD % 8 == 0, "products take 8 columns");
  static constexpr int kColumns = HEAD / 8, kPairs = kColumns / 2;  // columns of 8, and of 16
  static constexpr bool kIsOdd = kColumns % 2 != 0;
  static constexpr int kStride = kIsOdd ? HEAD : HEAD + 8;
};

// WARPS warps with 16 queries each, and blocks of KEYS keys.
template <int HEAD, int WARPS, int KEYS>
struct Shape : Columns<HEAD> {
  static_assert(KEYS % 16 == 0, "products take 16 keys");
  using Columns<HEAD>::kStride;
  // Blocks of a multiprocessor, which bound the registers: a thread holds HEAD / 2 + KEYS / 2 sums.
  static constexpr int kBlocks = (HEAD + KEYS > 160 ? 12 : 16) / WARPS;
  static constexpr int kQueries = 16 * WARPS, kThreads = 32 * WARPS;
  static constexpr size_t kShared = sizeof(half) * kStride * (kQueries + 2 * KEYS);
};

// Copy `count` tokens of a head to shared memory, by `threads` threads; zeros behind the last token.
template <class S, int HEAD>
__device__ __forceinline__ void copy_rows(const AttentionArgs& a, half* to, const half* from, int image, int length,
                                          int head, int first, int count, int thread, int threads) {
  for (int i = thread; i < count * S::kColumns; i += threads) {
    const int row = i / S::kColumns, column = i % S::kColumns;
    const bool exists = first + row < length;
    const half* source = from + (exists ? input_offset<HEAD>(a, image, length, first + row, head) + 8 * column : 0);
    half* target = to + row * S::kStride + 8 * column;
    if (a.aligned)
      copy16_async(target, source, exists);
    else
      store8(target, exists ? load8(source, false) : Half8{}, true);
  }
}

// Scores of a warp's 16 queries and the keys of a block. A lane holds the rows lane / 4 and 8 more.
//
// Neighboring products have different sums: a product waits for the one before it with the same sums.
template <class S, int KEYS>
__device__ __forceinline__ void multiply_keys(float (&scores)[KEYS / 8][4], const half* q_rows, const half* k_tile) {
  const int lane = threadIdx.x % 32;
  const half* q_row = q_rows + lane % 16 * S::kStride;
#pragma unroll
  for (int i = 0; i < KEYS / 2; i++) scores[i / 4][i % 4] = 0;
#pragma unroll
  for (int step = 0; step < S::kPairs; step++) {
    uint32_t q[4];
    load_matrices<4, false>(q, q_row + 16 * step + 8 * (lane / 16));
#pragma unroll
    for (int n = 0; n < KEYS / 8; n += 2) {
      uint32_t k[4];  // of eight keys 16 columns, and of the next eight
      load_matrices<4, false>(k, k_tile + (8 * (n + lane / 16) + lane % 8) * S::kStride + 16 * step + lane / 8 % 2 * 8);
      multiply_add<16>(scores[n], q, k);
      multiply_add<16>(scores[n + 1], q, k + 2);
    }
  }
  if constexpr (S::kIsOdd) {
    uint32_t q[2];
    load_matrices<2, false>(q, q_row + 16 * S::kPairs);
#pragma unroll
    for (int n = 0; n < KEYS / 8; n += 2) {
      uint32_t k[2];
      load_matrices<2, false>(k, k_tile + (8 * n + lane % 16) * S::kStride + 16 * S::kPairs);
      multiply_add<8>(scores[n], q, k);
      multiply_add<8>(scores[n + 1], q, k + 1);
    }
  }
}

// out += weights @ values of a block.
template <class S, int KEYS>
__device__ __forceinline__ void multiply_values(float (&out)[S::kColumns][4], const float (&weights)[KEYS / 8][4],
                                                const half* v_tile) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < KEYS / 16; step++) {
    uint32_t p[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float(&pair)[4] = weights[2 * step + i / 2];
      p[i] = pack_bits(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
    }
    const half* row = v_tile + (16 * step + lane % 16) * S::kStride;
#pragma unroll
    for (int column = 0; column + 2 <= S::kColumns; column += 2) {
      uint32_t v[4];
      load_matrices<4, true>(v, row + 8 * (column + lane / 16));
      multiply_add<16>(out[column], p, v);
      multiply_add<16>(out[column + 1], p, v + 2);
    }
    if constexpr (S::kIsOdd) {
      uint32_t v[2];
      load_matrices<2, true>(v, row + 8 * (S::kColumns - 1));
      multiply_add<16>(out[S::kColumns - 1], p, v);
    }
  }
}

// The running maximum and sum of two rows, and what the sums before this block shrink by.
struct Softmax {
  float top[2] = {kMasked, kMasked}, sum[2] = {};

  // Turn scores into exp2(scale * (score - top)) and return the factors of the two rows.
  template <int COUNT>
  __device__ __forceinline__ float2 update(float (&scores)[COUNT][4], float scale) {
    float shrink[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float higher = top[r];
#pragma unroll
      for (int n = 0; n < COUNT; n++) higher = fmaxf(higher, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
      higher = quad_max(higher);
      shrink[r] = fast_exp2((top[r] - higher) * scale);
      top[r] = higher;
      sum[r] *= shrink[r];
      const float shift = higher * scale;
#pragma unroll
      for (int n = 0; n < COUNT; n++) {
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; i++) {
          scores[n][i] = fast_exp2(fmaf(scores[n][i], scale, -shift));
          sum[r] += scores[n][i];
        }
      }
    }
    return make_float2(shrink[0], shrink[1]);
  }
};

__device__ __forceinline__ int count_keys(const AttentionArgs& a, int image) {
  return a.counts ? min(max(a.counts[image], 1), a.keys) : a.keys;
}

// Mask the scores of keys behind the last, in a block whose first key is `first`.
template <int COUNT>
__device__ __forceinline__ void mask_scores(float (&scores)[COUNT][4], int first, int keys) {
#pragma unroll
  for (int n = 0; n < COUNT; n++) {
    const int key = first + 8 * n;
    if (key + 8 <= keys) continue;
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (key + 2 * int(threadIdx.x % 4) + i % 2 >= keys) scores[n][i] = kMasked;
  }
}

// Put the result of 16 queries into shared memory, from which a thread stores 16 bytes at a time.
template <class S>
__device__ __forceinline__ void put_rows(half* rows, const float (&out)[S::kColumns][4], const Softmax& softmax) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float inverse = __fdividef(1.0f, quad_sum(softmax.sum[r]));
    half* to = rows + (lane / 4 + 8 * r) * S::kStride + 2 * (lane % 4);
#pragma unroll
    for (int column = 0; column < S::kColumns; column++)
      *reinterpret_cast<half2*>(to + 8 * column) =
          __floats2half2_rn(out[column][2 * r] * inverse, out[column][2 * r + 1] * inverse);
  }
}

// Store 16 rows from `first` on, by a warp.
template <class S, int HEAD>
__device__ __forceinline__ void store_rows(const AttentionArgs& a, const half* rows, int image, int head, int first) {
  for (int i = threadIdx.x % 32; i < 16 * S::kColumns; i += 32) {
    const int row = i / S::kColumns, column = i % S::kColumns;
    if (first + row < a.queries)
      store8(a.y + row_offset<HEAD>(a, image, a.queries, first + row, head) + 8 * column,
             load8(rows + row * S::kStride + 8 * column, true), a.aligned);
  }
}

template <int HEAD, int WARPS, int KEYS>
__global__ void __launch_bounds__(32 * WARPS, Shape<HEAD, WARPS, KEYS>::kBlocks)
    attention_kernel(const AttentionArgs a) {
  prior_kernels_wait();
  using S = Shape<HEAD, WARPS, KEYS>;
  half* q_tile = reinterpret_cast<half*>(shared_memory());
  half *k_tile = q_tile + S::kQueries * S::kStride, *v_tile = k_tile + KEYS * S::kStride;
  const int head = blockIdx.y % a.heads, image = blockIdx.y / a.heads, first = blockIdx.x * S::kQueries;
  const int first_of_warp = 16 * (threadIdx.x / 32);
  half* q_rows = q_tile + first_of_warp * S::kStride;
  const auto copy = [&](half* to, const half* from, int length, int token, int count) {
    copy_rows<S, HEAD>(a, to, from, image, length, head, token, count, threadIdx.x, S::kThreads);
  };
  copy_rows<S, HEAD>(a, q_tile, a.q, image % a.query_images, a.queries, head, first, S::kQueries, threadIdx.x, S::kThreads);
  copy(k_tile, a.k, a.keys, 0, KEYS);
  copies_commit();
  copy(v_tile, a.v, a.keys, 0, KEYS);
  copies_commit();
  const int keys = count_keys(a, image);
  copies_wait<1>();
  block_sync();
  float out[S::kColumns][4] = {}, scores[KEYS / 8][4];
  Softmax softmax;
  for (int key = 0; key < keys; key += KEYS) {
    if (key > 0) {
      copy(v_tile, a.v, a.keys, key, KEYS);
      copies_commit();
    }
    multiply_keys<S, KEYS>(scores, q_rows, k_tile);
    copies_wait<0>();
    block_sync();  // all warps have read the keys, and all values are there
    if (key + KEYS < keys) {
      copy(k_tile, a.k, a.keys, key + KEYS, KEYS);
      copies_commit();
    }
    mask_scores(scores, key, keys);
    const float2 shrink = softmax.update(scores, a.scale);
#pragma unroll
    for (int i = 0; i < 4 * S::kColumns; i++) out[i / 4][i % 4] *= i % 4 < 2 ? shrink.x : shrink.y;
    multiply_values<S, KEYS>(out, scores, v_tile);
    if (key + KEYS < keys) {
      copies_wait<0>();
      block_sync();  // all warps have read the values, and the next keys are there
    }
  }
  put_rows<S>(q_rows, out, softmax);
  warp_sync();
  store_rows<S, HEAD>(a, q_rows, image, head, first + first_of_warp);
}

template <int HEAD, int WARPS, int KEYS>
void launch_long(const AttentionArgs& a, void* stream) {
  using S = Shape<HEAD, WARPS, KEYS>;
  launch(attention_kernel<HEAD, WARPS, KEYS>,
         dim3(ceil_div(a.queries, S::kQueries), unsigned(a.heads * a.batch)), S::kThreads, S::kShared, stream, 1, a);
}

}  // namespace portable
}  // namespace sdonnx
