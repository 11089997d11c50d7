// ChannelsLastConv(x (B,H,W,C), w (M,kH,kW,C), bias (M,)?) -> y (B,H',W',M), fp16 with float32 sums: the convolution with the same
// stride and the same padding by zeros on all sides, attributes `stride` and `pad`.
//
// cuDNN computes it, by the first plan of its heuristic. ONNX Runtime's operator does so too, and lets the heuristic check
// every engine for each node; here the nodes of one size share a plan (docs/decisions/0198).
#pragma once
#include "device.cuh"
#ifndef SDONNX_EMULATION
#include <map>
#include <tuple>

#include "cudnn_plan.h"
#endif

namespace sdonnx {

struct Convolution {
  const half *x, *w, *bias;
  half* y;
  int64_t batch, height, width, channels;  // of x
  int64_t out_height, out_width, out_channels;
  int64_t kernel_height, kernel_width;
  int64_t stride, pad;
};

#ifdef SDONNX_EMULATION

inline void convolve(const Context&, const Convolution& c) {
  int64_t at = 0;
  for (int64_t image = 0; image < c.batch; image++)
    for (int64_t row = 0; row < c.out_height; row++)
      for (int64_t column = 0; column < c.out_width; column++)
        for (int64_t m = 0; m < c.out_channels; m++, at++) {
          float sum = 0;
          for (int64_t i = 0; i < c.kernel_height; i++)
            for (int64_t j = 0; j < c.kernel_width; j++) {
              const int64_t y = row * c.stride + i - c.pad, x = column * c.stride + j - c.pad;
              if (y < 0 || y >= c.height || x < 0 || x >= c.width) continue;
              const half* pixel = c.x + ((image * c.height + y) * c.width + x) * c.channels;
              const half* weights = c.w + ((m * c.kernel_height + i) * c.kernel_width + j) * c.channels;
              for (int64_t k = 0; k < c.channels; k++) sum += float(pixel[k].value) * float(weights[k].value);
            }
          c.y[at].value = _Float16(sum + (c.bias ? float(c.bias[m].value) : 0.0f));
        }
}

#else

namespace dnn {

// Memory that begins at a multiple of 16 bytes, which the plans require: a tensor's own, or scratch memory for a copy of it.
class AlignedMemory {
 public:
  AlignedMemory(const Context& context, const half* tensor, int64_t count)
      : tensor_(const_cast<half*>(tensor)),
        size_(is_aligned(tensor) ? 0 : count * sizeof(half)),
        stream_(static_cast<cudaStream_t>(context.stream())),
        copy_(context.scratch(size_)) {}

  const AlignedMemory& read() const {
    if (size_) check_cuda(cudaMemcpyAsync(data(), tensor_, size_, cudaMemcpyDeviceToDevice, stream_), "cudaMemcpyAsync");
    return *this;
  }
  void write() const {
    if (size_) check_cuda(cudaMemcpyAsync(tensor_, data(), size_, cudaMemcpyDeviceToDevice, stream_), "cudaMemcpyAsync");
  }
  void* data() const { return size_ ? copy_.data() : tensor_; }

 private:
  half* tensor_;
  size_t size_;  // in bytes, 0 without a copy
  cudaStream_t stream_;
  Scratch copy_;
};

// The plans of a process, by the sizes of convolutions. They are kept as long as the process: captured graphs may have kernels
// that cuDNN compiled for a plan.
class Convolver {
 public:
  static Convolver& instance() {
    static Convolver* const convolver = new Convolver;  // as cuDNN's libraries may not outlive it
    return *convolver;
  }

  void run(const Context& context, const Convolution& c) {
    const auto stream = static_cast<cudaStream_t>(context.stream());
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    require(library().is_usable, "cuDNN cannot be loaded; expected libcudnn.so.9, which ONNX Runtime needs as well");
    const bool is_captured = status != cudaStreamCaptureStatusNone;
    try {
      const HandleLock lock(device, stream, is_captured);
      const Plan& plan = plan_for(lock.handle, device, c, is_captured);
      const Scratch workspace = context.scratch(plan.workspace_bytes);
      const AlignedMemory x(context, c.x, c.batch * c.height * c.width * c.channels);
      const AlignedMemory w(context, c.w, c.out_channels * c.kernel_height * c.kernel_width * c.channels);
      const AlignedMemory y(context, c.y, c.batch * c.out_height * c.out_width * c.out_channels);
      const AlignedMemory bias(context, c.bias, c.out_channels);
      std::vector<const void*> pointers = {x.read().data(), w.read().data(), y.data()};
      if (c.bias) pointers.push_back(bias.read().data());
      const Descriptor pack = pack_of(pointers, workspace.data());
      check(library().execute(lock.handle, plan.plan->raw(), pack.raw()));
      y.write();
    } catch (const Unsupported& error) {
      const bool no_memory = error.status == kNoHostMemory || error.status == kNoDeviceMemory;
      const std::string reason = no_memory      ? "out of memory"
                                 : error.status ? library().error_text(error.status)
                                 : is_captured  ? "a size has to run once before it is captured"
                                                : "it has no plan for this size";
      require(false, "ChannelsLastConv: cuDNN cannot convolve " + std::to_string(c.batch) + " x " +
                         std::to_string(c.height) + " x " + std::to_string(c.width) + " x " + std::to_string(c.channels) +
                         " by a kernel of " + std::to_string(c.kernel_height) + " x " + std::to_string(c.kernel_width) +
                         " to " + std::to_string(c.out_channels) + " channels, stride " + std::to_string(c.stride) +
                         ", pad " + std::to_string(c.pad) + (c.bias ? ", with a bias: " : ": ") + reason);
    }
  }

 private:
  using Key = std::tuple<int, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool>;

  const Plan& plan_for(Handle handle, int device, const Convolution& c, bool is_captured) {
    const Key key{device,          c.batch,        c.height, c.width, c.channels,        c.out_channels,
                  c.kernel_height, c.kernel_width, c.stride, c.pad,   c.bias != nullptr};
    std::unique_ptr<Plan>& plan = plans_[key];
    if (!plan) {
      if (is_captured) throw Unsupported{};  // cuDNN may allocate memory for a plan, and load kernels
      auto made = std::make_unique<Plan>();
      build(*made, handle, c);
      plan = std::move(made);
    }
    return *plan;
  }

  // Tensors 1 to 4 are x, w, y and the bias. The product is not rounded before the bias is added.
  static void build(Plan& plan, Handle handle, const Convolution& c) {
    const auto tensor = [&](int64_t id, int type, const std::vector<int64_t>& nchw, Attribute flag = kTensorId) -> const Descriptor& {
      const std::vector<int64_t> strides = {nchw[1] * nchw[2] * nchw[3], 1, nchw[1] * nchw[3], nchw[1]};
      return plan.keep(tensor_of(id, type, nchw, strides, flag));
    };
    const std::vector<int64_t> result = {c.batch, c.out_channels, c.out_height, c.out_width};
    const Descriptor& x = tensor(1, kHalf, {c.batch, c.channels, c.height, c.width});
    const Descriptor& w = tensor(2, kHalf, {c.out_channels, c.channels, c.kernel_height, c.kernel_width});
    const Descriptor& y = tensor(3, kHalf, result);
    const Descriptor& product = c.bias ? tensor(5, kFloat, result, kTensorIsVirtual) : y;
    const Descriptor& convolve = plan.keep(convolution(plan, c, x, w, product));
    if (!c.bias) return plan.make(handle, {&convolve});
    const Descriptor& bias = tensor(4, kHalf, {1, c.out_channels, 1, 1});
    const int type = kFloat, mode = kAdd;
    Descriptor by(kPointwise);
    by.set(kPointwiseModeOf, kPointwiseMode, &mode);
    by.set(kPointwiseType, kDataType, &type);
    by.finalize();
    Descriptor add(kPointwiseOf);
    add.set(kPointwiseBy, plan.keep(std::move(by)));
    add.set(kPointwiseX, product);
    add.set(kPointwiseB, bias);
    add.set(kPointwiseY, y);
    add.finalize();
    plan.make(handle, {&convolve, &plan.keep(std::move(add))});
  }

  static Descriptor convolution(Plan& plan, const Convolution& c, const Descriptor& x, const Descriptor& w, const Descriptor& y) {
    const int type = kFloat, mode = kCrossCorrelation;
    Descriptor by(kConvolution);
    by.set(kConvolutionAxes, std::vector<int64_t>{2});
    by.set(kConvolutionType, kDataType, &type);
    by.set(kConvolutionModeOf, kConvolutionMode, &mode);
    by.set(kConvolutionPadsBefore, std::vector<int64_t>{c.pad, c.pad});
    by.set(kConvolutionPadsBehind, std::vector<int64_t>{c.pad, c.pad});
    by.set(kConvolutionStrides, std::vector<int64_t>{c.stride, c.stride});
    by.set(kConvolutionDilations, std::vector<int64_t>{1, 1});
    by.finalize();
    const float alpha = 1, beta = 0;
    Descriptor convolve(kConvolve);
    convolve.set(kConvolveBy, plan.keep(std::move(by)));
    convolve.set(kConvolveX, x);
    convolve.set(kConvolveW, w);
    convolve.set(kConvolveY, y);
    convolve.set(kConvolveAlpha, kReal, &alpha);
    convolve.set(kConvolveBeta, kReal, &beta);
    convolve.finalize();
    return convolve;
  }

  std::map<Key, std::unique_ptr<Plan>> plans_;
};

}  // namespace dnn

inline void convolve(const Context& context, const Convolution& c) { dnn::Convolver::instance().run(context, c); }

#endif

class ChannelsLastConv : public Kernel {
 public:
  explicit ChannelsLastConv(const Info& info)
      : Kernel(info), stride_(info.integer("stride", 1)), pad_(info.integer("pad", 0)) {
    require(stride_ > 0 && pad_ >= 0, "ChannelsLastConv: expected a stride of at least 1 and a pad of at least 0");
  }

  void compute(const Context& context) override {
    const Tensor x = context.input(0), w = context.input(1), bias = context.input(2);
    require(x.shape.size() == 4 && w.shape.size() == 4 && x.last() == w.last(),
            "ChannelsLastConv: x (B,H,W,C) and w (M,kH,kW,C) must have the same C");
    Convolution c{};
    c.batch = x.shape[0];
    c.height = x.shape[1];
    c.width = x.shape[2];
    c.channels = x.shape[3];
    c.out_channels = w.shape[0];
    c.kernel_height = w.shape[1];
    c.kernel_width = w.shape[2];
    c.stride = stride_;
    c.pad = pad_;
    require(c.height > 0 && c.width > 0 && c.channels > 0, "ChannelsLastConv: the image has no pixels or no channels");
    require(c.height + 2 * pad_ >= c.kernel_height && c.width + 2 * pad_ >= c.kernel_width,
            "ChannelsLastConv: the kernel is larger than the padded image of " + std::to_string(c.height) + " x " +
                std::to_string(c.width));
    c.out_height = (c.height + 2 * pad_ - c.kernel_height) / stride_ + 1;
    c.out_width = (c.width + 2 * pad_ - c.kernel_width) / stride_ + 1;
    require(!bias.present || bias.size() == c.out_channels, "ChannelsLastConv: the bias must have a number per channel");
    c.x = x.as<half>();
    c.w = w.as<half>();
    c.bias = bias.as<half>();
    c.y = static_cast<half*>(context.output(0, {c.batch, c.out_height, c.out_width, c.out_channels}));
    if (c.batch > 0 && c.out_channels > 0) convolve(context, c);
  }

 private:
  int64_t stride_, pad_;
};

inline Signature channels_last_conv_signature() {
  return {"ChannelsLastConv",
          kProvider,
          {{ort::kFloat16}, {ort::kFloat16}, {ort::kFloat16, ort::kOptional}},
          {{ort::kFloat16}},
          make_kernel<ChannelsLastConv>};
}

}  // namespace sdonnx
