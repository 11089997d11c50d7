// GroupNorm(x (N,H,W,C), gamma (C,), beta (C,), skip?, bias (C,)?) -> (y, s?), channels last:
// s = x + skip + bias, y = GroupNorm(s), then SiLU if `activation`. x, skip, bias, y and s are fp16, gamma and beta float32.
// skip is (N,H,W,C), or one row per image: (N,1,1,C) or (N,C).
//
// Two forms, both without atomics and with a fixed order of all sums, so that results are the same in every run:
// - one launch: a cluster of blocks holds some channels (a slab) of one image in shared memory, so that x is read once
// - two launches: sums of chunks of rows, then the norm, which reads x again. For images too large for shared memory, and
//   for GPUs without clusters
// A thread works on eight channels, which belong to at most two groups: groups have 4, 6, 8 or more channels, an even
// number. The variance is E[s^2] - E[s]^2 in float32, as in ONNX Runtime's kernel.
#pragma once
#include "device.cuh"

namespace sdonnx {

constexpr int kGroupNormThreads = 512;  // of a block, at most
constexpr int kMaxSlab = 320;           // channels of a cluster, at most
constexpr int kMaxGroups = 128;         // groups, at most: the second launch holds their statistics in shared memory

struct GroupNormArgs {
  const half *x, *skip, *row, *bias;
  const float *gamma, *beta;
  half *y, *sum;
  float2* partial;
  int positions, channels, group_size, groups;
  int slab, rows, chunks;  // channels of a cluster, positions of a block, blocks of an image in the first of two launches
  float epsilon, inverse_count;
  bool silu, aligned;
};

__device__ __forceinline__ bool adds(const GroupNormArgs& a) { return a.skip || a.row || a.bias; }

// The row and the bias of eight channels, which are added at every position.
__device__ __forceinline__ void constant_terms(const GroupNormArgs& a, int image, int channel, float out[8]) {
#pragma unroll
  for (int j = 0; j < 8; j++) out[j] = 0;
  if (a.bias) add8(out, a.bias + channel, a.aligned);
  if (a.row) add8(out, a.row + size_t(image) * a.channels + channel, a.aligned);
}

// s at eight channels, rounded to fp16: the norm sees what the graph sees.
__device__ __forceinline__ Half8 summed(const GroupNormArgs& a, size_t at, const float terms[8]) {
  const Half8 x = load8(a.x + at, a.aligned);
  if (!adds(a)) return x;
  float total[8];
  unpack(x, total);
  if (a.skip) add8(total, a.skip + at, a.aligned);
#pragma unroll
  for (int j = 0; j < 8; j++) total[j] += terms[j];
  return pack(total);
}

// Sums and sums of squares of the first and second group that eight channels belong to; `edge` channels are the first's.
struct Sums {
  float2 first, second;
};
__device__ __forceinline__ void accumulate(Sums& sums, const Half8& values, int edge) {
  float f[8];
  unpack(values, f);
#pragma unroll
  for (int j = 0; j < 8; j++) {  // branches: an index would put the sums into memory
    if (j < edge) {
      sums.first.x += f[j];
      sums.first.y = fmaf(f[j], f[j], sums.first.y);
    } else {
      sums.second.x += f[j];
      sums.second.y = fmaf(f[j], f[j], sums.second.y);
    }
  }
}

// Add the sums of all threads to one pair per group of the block. `spread` holds two pairs per thread.
__device__ __forceinline__ void reduce_groups(const GroupNormArgs& a, const float2* spread, int vectors, int rows_at_once,
                                              int groups, float2* out, int stride) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  for (int g = warp; g < groups; g += warps) {
    const int first = g * a.group_size / 8, last = ((g + 1) * a.group_size - 1) / 8, count = last - first + 1;
    float sum = 0, squares = 0;
    for (int i = lane; i < count * rows_at_once; i += 32) {
      const int v = first + i % count, r = i / count;
      const int second = v * 8 / a.group_size != g;
      const float2 pair = spread[second * blockDim.x + r * vectors + v];
      sum += pair.x;
      squares += pair.y;
    }
    sum = warp_sum(sum);
    squares = warp_sum(squares);
    if (lane == 0) out[g * stride] = make_float2(sum, squares);
  }
}

// (mean, 1 / deviation) of a group, from its sum and its sum of squares.
__device__ __forceinline__ float2 statistics(const GroupNormArgs& a, float sum, float squares) {
  const float mean = sum * a.inverse_count;
  const float variance = fmaf(squares, a.inverse_count, -mean * mean);
  return make_float2(mean, rsqrtf((variance > 0 ? variance : 0) + a.epsilon));
}

__device__ __forceinline__ Half8 normalized(const GroupNormArgs& a, const Half8& values, const float scale[8],
                                            const float shift[8]) {
  float f[8];
  unpack(values, f);
#pragma unroll
  for (int j = 0; j < 8; j++) {
    f[j] = fmaf(f[j], scale[j], shift[j]);
    if (a.silu) f[j] = silu(f[j]);
  }
  return pack(f);
}

// One launch. Grid: (slabs * cluster, images). Shared memory: the tile, two pairs per thread, and two pairs per group.
__global__ void __launch_bounds__(kGroupNormThreads, 2) group_norm_kernel(const GroupNormArgs a) {
  const int vectors = a.slab / 8, v = threadIdx.x % vectors, r0 = threadIdx.x / vectors;
  const int rows_at_once = blockDim.x / vectors, groups = a.slab / a.group_size;
  const int cluster = cluster_size(), rank = cluster_rank(), image = blockIdx.y;
  const int channel = int(blockIdx.x) / cluster * a.slab + v * 8;
  const int first = rank * a.rows, rows = min(a.rows, a.positions - first);
  Half8* tile = reinterpret_cast<Half8*>(shared_memory());
  float2* spread = reinterpret_cast<float2*>(tile + a.rows * vectors);
  float2* partial = spread + 2 * blockDim.x;
  float2* stats = partial + groups;
  const size_t base = (size_t(image) * a.positions + first) * a.channels + channel;
  const bool works = r0 < rows_at_once;  // the block is rounded up to whole warps
  const int group = v * 8 / a.group_size, edge = (group + 1) * a.group_size - v * 8;
  float terms[8];
  constant_terms(a, image, channel, terms);
  Sums sums{};
  if (works) {
    for (int r = r0; r < rows; r += rows_at_once) {
      const size_t at = base + size_t(r) * a.channels;
      const Half8 values = summed(a, at, terms);
      if (a.sum) store8(a.sum + at, values, a.aligned);
      tile[r * vectors + v] = values;
      accumulate(sums, values, edge);
    }
  }
  spread[threadIdx.x] = sums.first;
  spread[blockDim.x + threadIdx.x] = sums.second;
  block_sync();
  reduce_groups(a, spread, vectors, rows_at_once, groups, partial, 1);
  cluster_arrive();
  cluster_wait();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  for (int g = warp; g < groups; g += warps) {
    float2 pair = make_float2(0, 0);
    if (lane < cluster) pair = *cluster_peer(partial + g, lane);
    const float sum = warp_sum(pair.x), squares = warp_sum(pair.y);
    if (lane == 0) stats[g] = statistics(a, sum, squares);
  }
  cluster_arrive();  // this block has read the others' sums
  block_sync();
  if (works) {
    float scale[8], shift[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float2 s = stats[group + (j >= edge)];
      scale[j] = a.gamma[channel + j] * s.y;
      shift[j] = fmaf(-s.x, scale[j], a.beta[channel + j]);
    }
    for (int r = r0; r < rows; r += rows_at_once)
      store8(a.y + base + size_t(r) * a.channels, normalized(a, tile[r * vectors + v], scale, shift), a.aligned);
  }
  cluster_wait();  // shared memory that others read must not end before they have read it
}

// The first of two launches. Grid: (chunks, images); partial (images, groups, chunks). A block reads all channels.
__global__ void __launch_bounds__(kGroupNormThreads, 2) group_norm_sums_kernel(const GroupNormArgs a) {
  const int vectors = a.channels / 8, v = threadIdx.x % vectors, r0 = threadIdx.x / vectors;
  const int rows_at_once = blockDim.x / vectors, image = blockIdx.y, channel = v * 8;
  const int first = int(blockIdx.x) * a.rows, rows = min(a.rows, a.positions - first);
  float2* spread = reinterpret_cast<float2*>(shared_memory());
  const size_t base = (size_t(image) * a.positions + first) * a.channels + channel;
  const int group = channel / a.group_size, edge = (group + 1) * a.group_size - channel;
  float terms[8];
  constant_terms(a, image, channel, terms);
  Sums sums{};
  if (r0 < rows_at_once) {
    for (int r = r0; r < rows; r += rows_at_once) {
      const size_t at = base + size_t(r) * a.channels;
      const Half8 values = summed(a, at, terms);
      if (a.sum) store8(a.sum + at, values, a.aligned);
      accumulate(sums, values, edge);
    }
  }
  spread[threadIdx.x] = sums.first;
  spread[blockDim.x + threadIdx.x] = sums.second;
  block_sync();
  reduce_groups(a, spread, vectors, rows_at_once, a.groups,
                a.partial + size_t(image) * a.groups * a.chunks + blockIdx.x, a.chunks);
}

// The second of two launches. Grid: (blocks, images); `rows` positions each.
__global__ void __launch_bounds__(kGroupNormThreads, 2) group_norm_scale_kernel(const GroupNormArgs a) {
  const int vectors = a.channels / 8, v = threadIdx.x % vectors, r0 = threadIdx.x / vectors;
  const int rows_at_once = blockDim.x / vectors, image = blockIdx.y, channel = v * 8;
  const int first = int(blockIdx.x) * a.rows, rows = min(a.rows, a.positions - first);
  float2* stats = reinterpret_cast<float2*>(shared_memory());
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  for (int g = warp; g < a.groups; g += warps) {
    const float2* of_group = a.partial + (size_t(image) * a.groups + g) * a.chunks;
    float sum = 0, squares = 0;
    for (int i = lane; i < a.chunks; i += 32) {
      sum += of_group[i].x;
      squares += of_group[i].y;
    }
    sum = warp_sum(sum);
    squares = warp_sum(squares);
    if (lane == 0) stats[g] = statistics(a, sum, squares);
  }
  block_sync();
  if (r0 >= rows_at_once) return;
  const int group = channel / a.group_size, edge = (group + 1) * a.group_size - channel;
  float terms[8], scale[8], shift[8];
  constant_terms(a, image, channel, terms);
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const float2 s = stats[group + (j >= edge)];
    scale[j] = a.gamma[channel + j] * s.y;
    shift[j] = fmaf(-s.x, scale[j], a.beta[channel + j]);
  }
  const size_t base = (size_t(image) * a.positions + first) * a.channels + channel;
  for (int r = r0; r < rows; r += rows_at_once) {
    const size_t at = base + size_t(r) * a.channels;
    const Half8 values = a.sum ? load8(a.sum + at, a.aligned) : summed(a, at, terms);
    store8(a.y + at, normalized(a, values, scale, shift), a.aligned);
  }
}

// The launch in one cluster per slab: its sizes, or `slab` 0 where the image does not fit.
struct ClusterPlan {
  int slab = 0, cluster = 1, rows = 0;
  unsigned threads = 0;
  size_t shared_bytes = 0;
};

inline int greatest_divisor(int a, int b) { return b ? greatest_divisor(b, a % b) : a; }

// Threads for `vectors` columns: as many rows at once as fit into `most` threads, in whole warps.
inline unsigned threads_for(int vectors, int rows, int most) {
  int at_once = std::max(1, most / vectors);
  while (at_once > 1 && at_once >= 2 * rows) at_once /= 2;
  return std::max(2u, ceil_div(vectors * at_once, 32)) * 32;
}

inline ClusterPlan cluster_plan(int images, int positions, int channels, int group_size, const DeviceLimits& device) {
  // From this size on, two launches were as fast on an H200 (docs/explanation/kernels.md).
  constexpr int64_t kLarge = 4096 * 320;
  ClusterPlan plan;
  if (int64_t(positions) * channels >= kLarge) return plan;
  // Slabs of whole groups and whole vectors; near 80 channels, and better a multiple of 16: a sector of 32 bytes.
  const int unit = group_size * 8 / greatest_divisor(group_size, 8);
  int best = 0;
  for (int slab = unit; slab <= std::min(channels, kMaxSlab); slab += unit) {
    if (channels % slab) continue;
    const int cost = std::abs(slab - 80) + (slab % 16 ? 40 : 0);
    if (!plan.slab || cost < best) {
      plan.slab = slab;
      best = cost;
    }
  }
  if (!plan.slab) return plan;
  const int most = device.major >= 9 ? 8 : 1;  // clusters of 16 are slow to place
  const size_t limit = std::min<size_t>(100 * 1024, device.shared_bytes - 16 * 1024);  // two blocks on a multiprocessor
  const auto tile = [&](int cluster) { return size_t(ceil_div(positions, cluster)) * plan.slab * 2; };
  while (plan.cluster < most && positions / (2 * plan.cluster) >= 8 &&
         int64_t(channels / plan.slab) * images * plan.cluster < device.multiprocessors)
    plan.cluster *= 2;
  while (plan.cluster < most && tile(plan.cluster) > limit) plan.cluster *= 2;
  if (tile(plan.cluster) > limit) {
    plan.slab = 0;
    return plan;
  }
  plan.rows = int(ceil_div(positions, plan.cluster));
  plan.threads = threads_for(plan.slab / 8, plan.rows, 256);
  const int groups = plan.slab / group_size;
  plan.shared_bytes = tile(plan.cluster) + sizeof(float2) * (2 * plan.threads + 2 * size_t(groups));
  return plan;
}

class GroupNorm : public Kernel {
 public:
  explicit GroupNorm(const Info& info)
      : Kernel(info),
        groups_(int(info.integer("groups", 32))),
        silu_(info.integer("activation", 0) != 0),
        epsilon_(info.real("epsilon", 1e-5f)) {}

  void compute(const Context& context) override {
    const Tensor x = context.input(0), gamma = context.input(1), beta = context.input(2), skip = context.input(3),
                 bias = context.input(4);
    require(x.shape.size() == 4, "GroupNorm of " + std::to_string(x.shape.size()) + " dimensions; expected (N,H,W,C)");
    const int64_t images = x.shape[0], positions = x.shape[1] * x.shape[2], channels = x.shape[3];
    const int64_t size = groups_ > 0 && channels % groups_ == 0 ? channels / groups_ : 0;
    require(size >= 4 && size % 2 == 0 && channels % 8 == 0 && channels <= 8 * kGroupNormThreads,
            "GroupNorm of " + std::to_string(channels) + " channels in " + std::to_string(groups_) +
                " groups; expected a multiple of 8, at most 4096, and an even number of at least 4 in a group");
    require(groups_ <= kMaxGroups, "GroupNorm: more than 128 groups");
    require(gamma.size() == channels && beta.size() == channels, "GroupNorm: gamma and beta must have a number per channel");
    require(!bias.present || bias.size() == channels, "GroupNorm: the bias must have a number per channel");
    const bool is_image = skip.present && skip.shape == x.shape && positions != 1;
    require(!skip.present || is_image || (skip.size() == images * channels && skip.last() == channels),
            "GroupNorm: skip must have the shape of x, or a row per image");
    require(positions <= 1 << 30 && images <= 65535, "GroupNorm: too many positions or images");
    GroupNormArgs a{};
    a.x = x.as<half>();
    a.skip = is_image ? skip.as<half>() : nullptr;
    a.row = is_image ? nullptr : skip.as<half>();
    a.bias = bias.as<half>();
    a.gamma = gamma.as<float>();
    a.beta = beta.as<float>();
    a.y = static_cast<half*>(context.output(0, x.shape));
    a.sum = static_cast<half*>(context.output(1, x.shape));
    a.positions = int(positions);
    a.channels = int(channels);
    a.group_size = int(size);
    a.groups = groups_;
    a.epsilon = epsilon_;
    a.inverse_count = 1.0f / (float(positions) * float(size));
    a.silu = silu_;
    a.aligned = is_aligned(a.x) && is_aligned(a.skip) && is_aligned(a.row) && is_aligned(a.bias) && is_aligned(a.y) &&
                is_aligned(a.sum);
    if (x.size() == 0) return;
    const DeviceLimits device = device_limits();
    const ClusterPlan plan = cluster_plan(int(images), a.positions, a.channels, a.group_size, device);
    if (plan.slab) {
      a.slab = plan.slab;
      a.rows = plan.rows;
      launch(group_norm_kernel, dim3(a.channels / plan.slab * plan.cluster, unsigned(images)), plan.threads,
             plan.shared_bytes, context.stream(), unsigned(plan.cluster), a);
      return;
    }
    const unsigned threads = threads_for(a.channels / 8, a.positions, kGroupNormThreads);
    // Two blocks on each multiprocessor. The second launch adds the chunks of a group in one warp: at most 128 of them.
    const int64_t blocks = std::max<int64_t>(1, 2 * device.multiprocessors / images);
    a.rows = int(ceil_div(positions, std::min<int64_t>(128, blocks)));
    a.chunks = int(ceil_div(positions, a.rows));
    const Scratch scratch = context.scratch(sizeof(float2) * images * a.groups * a.chunks);
    a.partial = static_cast<float2*>(scratch.data());
    launch(group_norm_sums_kernel, dim3(a.chunks, unsigned(images)), threads, sizeof(float2) * 2 * threads,
           context.stream(), 1, a);
    a.rows = int(ceil_div(positions, blocks));
    launch(group_norm_scale_kernel, dim3(ceil_div(positions, a.rows), unsigned(images)), threads,
           sizeof(float2) * a.groups, context.stream(), 1, a);
  }

 private:
  int groups_;
  bool silu_;
  float epsilon_;
};

inline Signature group_norm_signature() {
  return {"GroupNorm",
          kProvider,
          {{ort::kFloat16},
           {ort::kFloat},
           {ort::kFloat},
           {ort::kFloat16, ort::kOptional},
           {ort::kFloat16, ort::kOptional}},
          {{ort::kFloat16}, {ort::kFloat16, ort::kOptional}},
          make_kernel<GroupNorm>};
}

}  // namespace sdonnx
