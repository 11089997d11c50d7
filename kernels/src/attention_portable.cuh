// Attention of head size 72 on mma.sync, for compute capability 8.0 and newer, in the manner of FlashAttention-2 (Dao 2023).
//
// A block of four warps computes 128 queries of one head, a warp 32 of them in two tiles of 16. Keys and values come in
// blocks of 64 tokens: values are copied during the products of the scores, the next keys during those with the values.
// 72 is a multiple of 8, so nothing is padded: the scores take four products of 16 columns and one of 8, the result is
// nine columns of 8. A row of 144 bytes begins four banks after the row before, so that eight rows are read without
// conflicts.
#pragma once
#include "attention_args.h"

namespace sdonnx {
namespace portable {

constexpr int kWarps = 4, kTiles = 2, kBlockQueries = 16 * kTiles * kWarps, kBlockKeys = 64;
constexpr int kColumns = kHeadSize / 8, kRowWords = 4 * (kHeadSize / 16) + 2;  // columns of 8; registers of 16 queries
constexpr size_t kAttentionShared = sizeof(half) * kHeadSize * (kBlockQueries + 2 * kBlockKeys);
static_assert(kHeadSize % 16 == 8, "the last product of the scores has 8 columns");

// Copy `count` tokens of a head to shared memory; zeros behind the last token.
__device__ __forceinline__ void copy_rows(const AttentionArgs& a, half* to, const half* from, int image, int length,
                                          int head, int first, int count) {
  for (int i = threadIdx.x; i < count * kColumns; i += 32 * kWarps) {
    const int row = i / kColumns, column = i % kColumns;
    const bool exists = first + row < length;
    const half* source = from + (exists ? row_offset(a, image, length, first + row, head) + 8 * column : 0);
    if (a.aligned)
      copy16_async(to + 8 * i, source, exists);
    else
      store8(to + 8 * i, exists ? load8(source, false) : Half8{}, true);
  }
}

// Scores of 32 queries and the keys of a block. A lane holds the rows lane / 4 and 8 more of each tile.
__device__ __forceinline__ void multiply_keys(float (&scores)[kTiles][kBlockKeys / 8][4],
                                              const uint32_t (&q)[kTiles][kRowWords], const half* k_tile) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kBlockKeys / 8; n++) {
    uint32_t k[kColumns];
    const half* row = k_tile + (8 * n + lane % 8) * kHeadSize;
    load_matrices<4, false>(k, row + 8 * (lane / 8));
    load_matrices<4, false>(k + 4, row + 32 + 8 * (lane / 8));
    load_matrices<1, false>(k + 8, row + 64);
#pragma unroll
    for (int tile = 0; tile < kTiles; tile++) {
      float(&sums)[4] = scores[tile][n];
      sums[0] = sums[1] = sums[2] = sums[3] = 0;
#pragma unroll
      for (int step = 0; step < 4; step++) multiply_add<16>(sums, q[tile] + 4 * step, k + 2 * step);
      multiply_add<8>(sums, q[tile] + 16, k + 8);
    }
  }
}

// out += weights @ values of a block.
__device__ __forceinline__ void multiply_values(float (&out)[kTiles][kColumns][4],
                                                const float (&weights)[kTiles][kBlockKeys / 8][4], const half* v_tile) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < kBlockKeys / 16; step++) {
    uint32_t p[kTiles][4];
#pragma unroll
    for (int tile = 0; tile < kTiles; tile++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float(&pair)[4] = weights[tile][2 * step + i / 2];
        p[tile][i] = pack_bits(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
      }
    const half* row = v_tile + (16 * step + lane % 16) * kHeadSize;
#pragma unroll
    for (int column = 0; column < kColumns - 1; column += 2) {
      uint32_t v[4];
      load_matrices<4, true>(v, row + 8 * (column + lane / 16));
#pragma unroll
      for (int tile = 0; tile < kTiles; tile++) {
        multiply_add<16>(out[tile][column], p[tile], v);
        multiply_add<16>(out[tile][column + 1], p[tile], v + 2);
      }
    }
    uint32_t v[2];
    load_matrices<2, true>(v, row + 8 * (kColumns - 1));
#pragma unroll
    for (int tile = 0; tile < kTiles; tile++) multiply_add<16>(out[tile][kColumns - 1], p[tile], v);
  }
}

// The running maximum and sum of two rows, and what the sums before this block shrink by.
struct Softmax {
  float top[2] = {kMasked, kMasked}, sum[2] = {};

  // Turn scores into exp2(scale * (score - top)) and return the factors of the two rows.
  __device__ __forceinline__ float2 update(float (&scores)[kBlockKeys / 8][4], float scale) {
    float shrink[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float higher = top[r];
#pragma unroll
      for (int n = 0; n < kBlockKeys / 8; n++) higher = fmaxf(higher, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
      higher = quad_max(higher);
      shrink[r] = fast_exp2((top[r] - higher) * scale);
      top[r] = higher;
      sum[r] *= shrink[r];
      const float shift = higher * scale;
#pragma unroll
      for (int n = 0; n < kBlockKeys / 8; n++) {
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

__global__ void __launch_bounds__(32 * kWarps, 2) attention_kernel(const AttentionArgs a) {
  half* q_tile = reinterpret_cast<half*>(shared_memory());
  half *k_tile = q_tile + kBlockQueries * kHeadSize, *v_tile = k_tile + kBlockKeys * kHeadSize;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = blockIdx.y % a.heads, image = blockIdx.y / a.heads, first = blockIdx.x * kBlockQueries;
  copy_rows(a, q_tile, a.q, image, a.queries, head, first, kBlockQueries);
  copy_rows(a, k_tile, a.k, image, a.keys, head, 0, kBlockKeys);
  copies_wait();
  block_sync();
  uint32_t q[kTiles][kRowWords];
#pragma unroll
  for (int tile = 0; tile < kTiles; tile++) {
    const half* row = q_tile + (16 * (kTiles * warp + tile) + lane % 16) * kHeadSize;
#pragma unroll
    for (int step = 0; step < 4; step++) load_matrices<4, false>(q[tile] + 4 * step, row + 16 * step + 8 * (lane / 16));
    load_matrices<2, false>(q[tile] + 16, row + 64);
  }
  float out[kTiles][kColumns][4] = {}, scores[kTiles][kBlockKeys / 8][4];
  Softmax softmax[kTiles];
  for (int key = 0; key < a.keys; key += kBlockKeys) {
    copy_rows(a, v_tile, a.v, image, a.keys, head, key, kBlockKeys);
    multiply_keys(scores, q, k_tile);
    copies_wait();
    block_sync();  // all warps have read the keys, and all values are there
    if (key + kBlockKeys < a.keys) copy_rows(a, k_tile, a.k, image, a.keys, head, key + kBlockKeys, kBlockKeys);
#pragma unroll
    for (int tile = 0; tile < kTiles; tile++) {
      if (key + kBlockKeys > a.keys) {
#pragma unroll
        for (int i = 0; i < kBlockKeys / 2; i++)
          if (key + 8 * (i / 4) + 2 * (lane % 4) + i % 2 >= a.keys) scores[tile][i / 4][i % 4] = kMasked;
      }
      const float2 shrink = softmax[tile].update(scores[tile], a.scale);
#pragma unroll
      for (int i = 0; i < 4 * kColumns; i++) out[tile][i / 4][i % 4] *= i % 4 < 2 ? shrink.x : shrink.y;
    }
    multiply_values(out, scores, v_tile);
    copies_wait();
    block_sync();  // all warps have read the values, and the next keys are there
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; tile++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float inverse = __fdividef(1.0f, quad_sum(softmax[tile].sum[r]));
      const int query = first + 16 * (kTiles * warp + tile) + lane / 4 + 8 * r;
      if (query < a.queries) {
        half* to = a.y + row_offset(a, image, a.queries, query, head) + 2 * (lane % 4);
#pragma unroll
        for (int column = 0; column < kColumns; column++) {
          const float(&sums)[4] = out[tile][column];
          const half2 pair = __floats2half2_rn(sums[2 * r] * inverse, sums[2 * r + 1] * inverse);
          if (a.aligned) {
            *reinterpret_cast<half2*>(to + 8 * column) = pair;
          } else {
            to[8 * column] = pair.x;
            to[8 * column + 1] = pair.y;
          }
        }
      }
    }
  }
}

inline void launch_attention(const AttentionArgs& a, void* stream) {
  launch(attention_kernel, dim3(ceil_div(a.queries, kBlockQueries), unsigned(a.heads * a.batch)), 32 * kWarps,
         kAttentionShared, stream, 1, a);
}

}  // namespace portable
}  // namespace sdonnx
