// The kernels of GroupNorm (group_norm.cuh): one launch of clusters, or two launches.
//
// A thread works on eight channels, which belong to at most two groups: groups have 4, 6, 8 or more channels, an even
// number. It keeps several rows in flight: a multiprocessor needs about 32 KB of outstanding loads to use the memory's
// bandwidth (bandwidth * latency, 4.8 TB/s * 0.8 us / 132 on an H200).
//
// All sums are in float32 and in a fixed order, without atomics, so that results are the same in every run. The variance is
// E[s^2] - E[s]^2, as in ONNX Runtime's kernel.
#pragma once
#include "device.cuh"

namespace sdonnx {

constexpr int kGroupNormThreads = 512;  // of a block, at most
constexpr int kMaxGroups = 128;         // groups, at most: the second launch holds their statistics in shared memory

struct GroupNormArgs {
  const half *x, *skip, *row, *bias;
  const int64_t* index;  // of the row of a table, which is the same for all images; null: row (images, channels)
  int64_t table_rows;
  const float *gamma, *beta;
  half *y, *sum;    // sum: s, null if nobody reads it
  float2* partial;  // of two launches: (images, groups, chunks)
  int positions, channels, group_size, groups;
  int slab, batches;  // of one launch: channels of a cluster, batches of kRows rows of a thread
  int rows, chunks;   // positions of a block, blocks of an image in the first of two launches
  int rows_at_once;   // rows that the threads of a block work on at the same time
  int table_width, offset;  // numbers of a row of the table, and the place of the first channel
  float epsilon, inverse_count;
  bool silu, aligned;
};

// The row and the bias of eight channels, which are added at every position.
__device__ __forceinline__ void constant_terms(const GroupNormArgs& a, int image, int channel, float out[8]) {
#pragma unroll
  for (int j = 0; j < 8; j++) out[j] = 0;
  if (a.bias) add8(out, a.bias + channel, a.aligned);
  if (a.row) {
    size_t at = size_t(image) * a.channels;
    if (a.index) {  // an index outside of the table reads its first or last row, not memory of others
      const int64_t index = *a.index;
      at = size_t(index < 0 ? 0 : index < a.table_rows ? index : a.table_rows - 1) * a.table_width + a.offset;
    }
    add8(out, a.row + at + channel, a.aligned);
  }
}

// kRows vectors, `stride` numbers apart, of which the first `count` exist. All loads are issued before any is used.
template <int kRows>
__device__ __forceinline__ void load_rows(Half8 (&out)[kRows], const half* source, int stride, int count, bool aligned) {
#pragma unroll
  for (int i = 0; i < kRows; i++) out[i] = Half8{};
  if (aligned) {
#pragma unroll
    for (int i = 0; i < kRows; i++)
      if (i < count) out[i] = load8(source + i * stride, true);
  } else {
#pragma unroll 1
    for (int i = 0; i < count && i < kRows; i++) {
      const Half8 values = load8(source + i * stride, false);
#pragma unroll
      for (int k = 0; k < kRows; k++)  // an index that is not known to the compiler would put `out` into memory
        if (k == i) out[k] = values;
    }
  }
}

// kRows vectors of s, rounded to fp16: the norm sees what the graph sees.
template <int kRows, bool kAdds>
__device__ __forceinline__ void load_sums(Half8 (&out)[kRows], const GroupNormArgs& a, size_t at, int stride, int count,
                                          const float terms[8]) {
  load_rows(out, a.x + at, stride, count, a.aligned);
  if (!kAdds) return;
  constexpr int kPart = kRows / 2;  // of the skip at a time: all of its rows need too many registers
#pragma unroll
  for (int from = 0; from < kRows; from += kPart) {
    Half8 skip[kPart];
    if (a.skip) {
      load_rows(skip, a.skip + at + from * stride, stride, count - from, a.aligned);
    } else {
#pragma unroll
      for (int i = 0; i < kPart; i++) skip[i] = Half8{};
    }
#pragma unroll
    for (int i = 0; i < kPart; i++) {
      if (from + i >= count) continue;
      float total[8], other[8];
      unpack(out[from + i], total);
      unpack(skip[i], other);
#pragma unroll
      for (int j = 0; j < 8; j++) total[j] = total[j] + other[j] + terms[j];
      out[from + i] = pack(total);
    }
  }
}

template <int kRows>
__device__ __forceinline__ void store_rows(half* target, const Half8 (&values)[kRows], int stride, int count,
                                           bool aligned) {
#pragma unroll
  for (int i = 0; i < kRows; i++)
    if (i < count) store8(target + i * stride, values[i], aligned);
}

// Sums and sums of squares of four pairs of channels. A pair is in one group.
struct PairSums {
  float2 pairs[4];
};
__device__ __forceinline__ void accumulate(PairSums& sums, const Half8& values) {
  float f[8];
  unpack(values, f);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sums.pairs[i].x += f[2 * i] + f[2 * i + 1];
    sums.pairs[i].y = fmaf(f[2 * i], f[2 * i], fmaf(f[2 * i + 1], f[2 * i + 1], sums.pairs[i].y));
  }
}

// Write a thread's sums of the first and the second group of its channels; `edge` channels are in the first.
__device__ __forceinline__ void spread_sums(float2* spread, const PairSums& sums, int edge) {
  float2 first = make_float2(0, 0), second = make_float2(0, 0);
#pragma unroll
  for (int i = 0; i < 4; i++) {  // no reference to either: it would put both into memory
    const bool is_first = 2 * i < edge;
    first.x += is_first ? sums.pairs[i].x : 0;
    first.y += is_first ? sums.pairs[i].y : 0;
    second.x += is_first ? 0 : sums.pairs[i].x;
    second.y += is_first ? 0 : sums.pairs[i].y;
  }
  spread[threadIdx.x] = first;
  spread[blockDim.x + threadIdx.x] = second;
}

// The sums of a group over all threads of the block, by one warp; every lane returns them.
__device__ __forceinline__ float2 group_sums(const GroupNormArgs& a, const float2* spread, int vectors, int group) {
  const int first = group * a.group_size / 8, last = ((group + 1) * a.group_size - 1) / 8;
  float sum = 0, squares = 0;
  for (int v = first; v <= last; v++) {
    const float2* column = spread + (v * 8 / a.group_size != group ? blockDim.x : 0) + v;
    for (int r = int(threadIdx.x % 32); r < a.rows_at_once; r += 32) {
      const float2 pair = column[r * vectors];
      sum += pair.x;
      squares += pair.y;
    }
  }
  sum = warp_sum(sum);
  squares = warp_sum(squares);
  return make_float2(sum, squares);
}

// (mean, 1 / deviation) of a group, from its sum and its sum of squares.
__device__ __forceinline__ float2 statistics(const GroupNormArgs& a, float sum, float squares) {
  const float mean = sum * a.inverse_count;
  const float variance = fmaf(squares, a.inverse_count, -mean * mean);
  return make_float2(mean, rsqrtf((variance > 0 ? variance : 0) + a.epsilon));
}

// y = s * scale + shift of eight channels.
struct Affine {
  float scale[8], shift[8];
};
__device__ __forceinline__ Affine load_affine(const GroupNormArgs& a, int channel) {
  Affine affine;
  load_floats8(affine.scale, a.gamma + channel, a.aligned);
  load_floats8(affine.shift, a.beta + channel, a.aligned);
  return affine;
}
__device__ __forceinline__ void normalize_with(Affine& affine, const float2* stats, int group, int edge) {
  const float2 first = stats[group];
  const float2 second = edge < 8 ? stats[group + 1] : first;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const float2 s = j < edge ? first : second;
    affine.scale[j] *= s.y;
    affine.shift[j] = fmaf(-s.x, affine.scale[j], affine.shift[j]);
  }
}
__device__ __forceinline__ Half8 apply(const Affine& affine, const Half8& values, bool with_silu) {
  float f[8];
  unpack(values, f);
#pragma unroll
  for (int j = 0; j < 8; j++) f[j] = fmaf(f[j], affine.scale[j], affine.shift[j]);
  if (with_silu) {
#pragma unroll
    for (int j = 0; j < 8; j++) f[j] = silu(f[j]);
  }
  return pack(f);
}

// Where a thread works: its vector of channels in the slab or row, its first row, and its rows.
struct Place {
  int vectors, v, r0;
};
__device__ __forceinline__ Place place_of(int channels) {
  const int vectors = channels / 8;
  return {vectors, int(threadIdx.x) % vectors, int(threadIdx.x) / vectors};
}

// How many of the rows r0, r0 + step, r0 + 2 * step, ... are below `rows`.
__device__ __forceinline__ int rows_of(int r0, int step, int rows) { return r0 < rows ? (rows - r0 - 1) / step + 1 : 0; }

// One launch. Grid: (slabs * cluster, images). A cluster holds some channels (a slab) of one image, so that s is read once:
// a thread holds the last kRows of its rows in registers and the others in shared memory.
// Shared memory: (batches - 1) * kRows vectors and two pairs per thread, and cluster + 1 pairs per group.
template <int kRows, bool kAdds>
__global__ void __launch_bounds__(kGroupNormThreads, kRows > 4 ? 1 : 2) group_norm_kernel(const GroupNormArgs a) {
  prior_kernels_wait();
  const Place p = place_of(a.slab);
  const int groups = a.slab / a.group_size, step = a.rows_at_once;
  const int cluster = cluster_size(), rank = cluster_rank(), image = blockIdx.y;
  const int channel = int(blockIdx.x) / cluster * a.slab + p.v * 8;
  const int first = rank * a.rows;
  // The block is rounded up to whole warps: threads behind the last row at once have no rows.
  const int left = p.r0 < step ? rows_of(p.r0, step, min(a.rows, a.positions - first)) : 0;
  Half8* tile = reinterpret_cast<Half8*>(shared_memory()) + threadIdx.x;
  float2* spread = reinterpret_cast<float2*>(shared_memory() + size_t(a.batches - 1) * kRows * blockDim.x * sizeof(Half8));
  float2* partial = spread + 2 * blockDim.x;  // (cluster, groups)
  float2* stats = partial + cluster * groups;
  const int stride = step * a.channels;
  const size_t base = (size_t(image) * a.positions + first + p.r0) * a.channels + channel;
  const int group = p.v * 8 / a.group_size, edge = (group + 1) * a.group_size - p.v * 8;
  cluster_arrive();  // the other blocks' shared memory exists once they have started
  float terms[8];
  if (kAdds) constant_terms(a, image, channel, terms);
  PairSums sums{};
  Half8 held[kRows];
  for (int batch = 0;; batch++) {
    const int begin = batch * kRows, count = left - begin;
    const size_t at = base + size_t(begin) * stride;
    load_sums<kRows, kAdds>(held, a, at, stride, count, terms);
    if (kAdds && a.sum) store_rows(a.sum + at, held, stride, count, a.aligned);
#pragma unroll
    for (int i = 0; i < kRows; i++) accumulate(sums, held[i]);  // rows that do not exist are zero
    if (batch + 1 == a.batches) break;
#pragma unroll
    for (int i = 0; i < kRows; i++) tile[size_t(begin + i) * blockDim.x] = held[i];
  }
  spread_sums(spread, sums, edge);
  Affine affine = load_affine(a, channel);
  block_sync();
  cluster_wait();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  for (int g = warp; g < groups; g += warps) {
    const float2 pair = group_sums(a, spread, p.vectors, g);
    if (lane < cluster) *cluster_peer(partial + rank * groups + g, lane) = pair;
  }
  cluster_arrive();
  cluster_wait();
  for (int g = threadIdx.x; g < groups; g += blockDim.x) {
    float sum = 0, squares = 0;
    for (int i = 0; i < cluster; i++) {
      sum += partial[i * groups + g].x;
      squares += partial[i * groups + g].y;
    }
    stats[g] = statistics(a, sum, squares);
  }
  block_sync();
  normalize_with(affine, stats, group, edge);
  half* y = a.y + base;
  const int last = (a.batches - 1) * kRows;
#pragma unroll
  for (int i = 0; i < kRows; i++)
    if (last + i < left) store8(y + size_t(last + i) * stride, apply(affine, held[i], a.silu), a.aligned);
#pragma unroll kRows
  for (int i = 0; i < last; i++)
    if (i < left) store8(y + size_t(i) * stride, apply(affine, tile[size_t(i) * blockDim.x], a.silu), a.aligned);
}

// The first of two launches. Grid: (chunks, images); partial (images, groups, chunks). A block reads all channels.
template <int kRows, bool kAdds>
__global__ void __launch_bounds__(kGroupNormThreads, kRows > 4 ? 1 : 2) group_norm_sums_kernel(const GroupNormArgs a) {
  prior_kernels_wait();
  const Place p = place_of(a.channels);
  const int image = blockIdx.y, channel = p.v * 8, step = a.rows_at_once, first = int(blockIdx.x) * a.rows;
  const int left = p.r0 < step ? rows_of(p.r0, step, min(a.rows, a.positions - first)) : 0;
  float2* spread = reinterpret_cast<float2*>(shared_memory());
  const int stride = step * a.channels;
  const size_t base = (size_t(image) * a.positions + first + p.r0) * a.channels + channel;
  const int group = channel / a.group_size, edge = (group + 1) * a.group_size - channel;
  float terms[8];
  if (kAdds) constant_terms(a, image, channel, terms);
  PairSums sums{};
  for (int begin = 0; begin < left; begin += kRows) {
    Half8 rows[kRows];
    const size_t at = base + size_t(begin) * stride;
    load_sums<kRows, kAdds>(rows, a, at, stride, left - begin, terms);
    if (kAdds && a.sum) store_rows(a.sum + at, rows, stride, left - begin, a.aligned);
#pragma unroll
    for (int i = 0; i < kRows; i++) accumulate(sums, rows[i]);
  }
  spread_sums(spread, sums, edge);
  block_sync();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  for (int g = warp; g < a.groups; g += warps) {
    const float2 pair = group_sums(a, spread, p.vectors, g);
    if (lane == 0) a.partial[(size_t(image) * a.groups + g) * a.chunks + blockIdx.x] = pair;
  }
}

// The second of two launches, of s as the first left it in a.sum, or of x, to which a row and a bias belong.
// Grid: (blocks, images); `rows` positions each. It works from the end to the beginning: the end of the image was read last
// and is still in the L2, and what reads y next finds its beginning there.
template <int kRows>
__global__ void __launch_bounds__(kGroupNormThreads, kRows > 4 ? 1 : 2) group_norm_scale_kernel(const GroupNormArgs a) {
  prior_kernels_wait();
  const Place p = place_of(a.channels);
  const int image = int(gridDim.y - 1 - blockIdx.y), channel = p.v * 8, step = a.rows_at_once;
  const int first = int(gridDim.x - 1 - blockIdx.x) * a.rows;
  const int left = p.r0 < step ? rows_of(p.r0, step, min(a.rows, a.positions - first)) : 0;
  float2* stats = reinterpret_cast<float2*>(shared_memory());
  const int stride = step * a.channels;
  const size_t base = (size_t(image) * a.positions + first + p.r0) * a.channels + channel;
  const half* source = (a.sum ? a.sum : a.x) + base;
  Half8 rows[kRows];
  load_rows(rows, source, stride, left, a.aligned);  // before the statistics, which take as long as a load
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  for (int g = warp; g < a.groups; g += warps) {
    const float2* of_group = a.partial + (size_t(image) * a.groups + g) * a.chunks;
    float sum = 0, squares = 0;
    for (int i = lane; i < a.chunks; i += 32) {
      const float2 pair = of_group[i];
      sum += pair.x;
      squares += pair.y;
    }
    sum = warp_sum(sum);
    squares = warp_sum(squares);
    if (lane == 0) stats[g] = statistics(a, sum, squares);
  }
  Affine affine = load_affine(a, channel);
  block_sync();
  const int group = channel / a.group_size, edge = (group + 1) * a.group_size - channel;
  normalize_with(affine, stats, group, edge);
  if (!a.sum) {
    float terms[8];
    constant_terms(a, image, channel, terms);
#pragma unroll
    for (int j = 0; j < 8; j++) affine.shift[j] = fmaf(terms[j], affine.scale[j], affine.shift[j]);
  }
  for (int begin = 0; begin < left; begin += kRows) {
    const size_t at = size_t(begin) * stride;
    if (begin) load_rows(rows, source + at, stride, left - begin, a.aligned);
#pragma unroll
    for (int i = 0; i < kRows; i++) rows[i] = apply(affine, rows[i], a.silu);
    store_rows(a.y + base + at, rows, stride, left - begin, a.aligned);
  }
}

}  // namespace sdonnx
