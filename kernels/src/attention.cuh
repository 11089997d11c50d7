// Attention(q (B,S,N*72), k (B,L,N*72), v (B,L,N*72)) -> softmax(scale q k^T) v (B,S,N*72), of N heads of 72 numbers,
// fp16 with a softmax and sums in float32. Without a scale it is 1 / sqrt(72).
//
// PixArt's transformer has heads of 72, which cuDNN's kernel pads to 128. Two kernels: on wgmma for compute capability 9.0
// and at least 128 queries and keys, on mma.sync for everything else. Both keep the running maximum and sum of the softmax
// (Milakov and Gimelshein 2018), so that scores are never stored, and a block of threads adds in a fixed order.
#pragma once
#include "attention_portable.cuh"
#ifndef SDONNX_EMULATION
#include "attention_wgmma.cuh"
#endif

namespace sdonnx {

class Attention : public Kernel {
 public:
  explicit Attention(const Info& info)
      : Kernel(info), heads_(info.integer("num_heads", 0)), scale_(info.real("scale", 0)) {}

  void compute(const Context& context) override {
    const Tensor q = context.input(0), k = context.input(1), v = context.input(2);
    require(q.shape.size() == 3 && k.shape.size() == 3 && v.shape == k.shape,
            "Attention: expected q (B,S,N*72), and k and v of one shape (B,L,N*72)");
    const int64_t batch = q.shape[0], queries = q.shape[1], keys = k.shape[1], width = q.shape[2];
    require(heads_ > 0 && width == heads_ * kHeadSize,
            "Attention of width " + std::to_string(width) + " in " + std::to_string(heads_) +
                " heads; expected heads of 72");
    require(k.shape[0] == batch && k.shape[2] == width, "Attention: k and v must have the batch and the width of q");
    require(scale_ >= 0, "Attention: the scale is negative");
    half* y = static_cast<half*>(context.output(0, q.shape));
    if (q.size() == 0) return;
    require(keys > 0, "Attention: there is no key");
    require(batch * heads_ <= 65535 && queries <= 1 << 30 && keys <= 1 << 30, "Attention: too many tokens, heads or images");
    constexpr float kLog2E = 1.4426950408889634f;
    AttentionArgs a{};
    a.q = q.as<half>();
    a.k = k.as<half>();
    a.v = v.as<half>();
    a.y = y;
    a.batch = int(batch);
    a.queries = int(queries);
    a.keys = int(keys);
    a.heads = int(heads_);
    a.scale = kLog2E * (scale_ > 0 ? scale_ : 1 / std::sqrt(float(kHeadSize)));
    a.aligned = is_aligned(a.q) && is_aligned(a.k) && is_aligned(a.v) && is_aligned(a.y);
#ifndef SDONNX_EMULATION
    if (sm90::accepts(a, device_limits())) {
      sm90::launch_attention(a, context.stream());
      return;
    }
#endif
    portable::launch_attention(a, context.stream());
  }

 private:
  int64_t heads_;
  float scale_;
};

inline Signature attention_signature() {
  return {"Attention",
          kProvider,
          {{ort::kFloat16}, {ort::kFloat16}, {ort::kFloat16}},
          {{ort::kFloat16}},
          make_kernel<Attention>};
}

}  // namespace sdonnx
