// The chunk-parallel gradient by itself: every pair of chunks gets its own h and dh, and the token
// recurrence of section 2.2 in float64 between them is the reference.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "cuda/device_case.h"
#include "cuda/sm90/chunk_bwd/grad.h"
#include "cuda/sm90/chunk_fwd/chunk_fwd.h"
#include "cuda/sm90/chunk_fwd/config.h"

namespace kda::cuda::sm90 {
namespace {

constexpr int kTokens = kGradTokens;
constexpr int kBlocks = 2;  ///< so that a block has several pairs
using Values = std::vector<double>;

/// kda::DType by value.
constexpr int kBf16 = 1;
constexpr int kFp16 = 2;
constexpr int kFp32 = 3;

struct Shape {
  int K, V, T, H, HV;
  double gate;  ///< natural-log decays reach down to this
  bool norm = false;
  bool fp32 = true;  ///< dq, dk; else as q
  int type = kBf16;  ///< of q
};

std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << "K " << s.K << " V " << s.V << " T " << s.T << " H " << s.H << " HV " << s.HV
             << " gate " << s.gate << (s.norm ? " l2norm" : "") << (s.fp32 ? "" : " narrow dq")
             << (s.type == kBf16 ? " bf16" : " fp16");
}

/// What a value becomes in an element type, and its bits.
double rounded(double x, int type, uint32_t& bits) {
  const auto wide = static_cast<float>(x);
  if (type == kFp32) {
    std::memcpy(&bits, &wide, sizeof bits);
    return wide;
  }
  if (type == kFp16) {
    const __half narrow = __float2half(wide);
    bits = __half_as_ushort(narrow);
    return __half2float(narrow);
  }
  const __nv_bfloat16 narrow = __float2bfloat16(wide);
  bits = __bfloat16_as_ushort(narrow);
  return __bfloat162float(narrow);
}

double value_of(uint32_t bits, int type) {
  if (type == kFp16) return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  const uint32_t wide = type == kFp32 ? bits : bits << 16;
  float x = 0;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}

/// Memory of the device with its values on the host.
struct Buffer {
  Values host;
  void* device = nullptr;
  int type;

  Buffer(std::size_t count, int element) : host(count), type(element) {
    cudaMalloc(&device, count * bytes());
    cudaMemset(device, 0xff, count * bytes());
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(device); }

  std::size_t bytes() const { return type == kFp32 ? 4 : 2; }
  /// Rounds the host's values to the element type.
  void upload() {
    std::vector<unsigned char> image(host.size() * bytes());
    for (std::size_t i = 0; i < host.size(); ++i) {
      uint32_t bits = 0;
      host[i] = rounded(host[i], type, bits);
      std::memcpy(image.data() + i * bytes(), &bits, bytes());
    }
    cudaMemcpy(device, image.data(), image.size(), cudaMemcpyHostToDevice);
  }
  Values download() const {
    std::vector<unsigned char> image(host.size() * bytes());
    cudaMemcpy(image.data(), device, image.size(), cudaMemcpyDeviceToHost);
    Values values(host.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      uint32_t bits = 0;
      std::memcpy(&bits, image.data() + i * bytes(), bytes());
      values[i] = value_of(bits, type);
    }
    return values;
  }
  Tensor tensor(int64_t tokens, int64_t heads, int64_t columns) const {
    return {device, {tokens * heads * columns, heads * columns, columns, 1}, type};
  }
};

/// Every bit set: NaN, where nothing has been written.
struct DeviceMemory {
  void* data = nullptr;

  explicit DeviceMemory(int64_t bytes) {
    cudaMalloc(&data, static_cast<std::size_t>(bytes));
    cudaMemset(data, 0xff, static_cast<std::size_t>(bytes));
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() { cudaFree(data); }
};

class Gradient {
 public:
  explicit Gradient(const Shape& s)
      : s_(s),
        chunks_((s.T + kTokens - 1) / kTokens),
        q(tokens(s.H, s.K), s.type),
        k(tokens(s.H, s.K), s.type),
        v(tokens(s.HV, s.V), s.type),
        g(tokens(s.HV, s.K), kFp32),
        beta(tokens(s.HV, 1), kFp32),
        grad_o(tokens(s.HV, s.V), s.type),
        v_new(tokens(s.HV, s.V), s.type),
        R(tokens(s.HV, s.V), s.type),
        h(states(), s.type),
        dh(states(), s.type),
        dq(tokens(s.HV, s.K), s.fp32 ? kFp32 : s.type),
        dk(tokens(s.HV, s.K), s.fp32 ? kFp32 : s.type),
        dv(tokens(s.HV, s.V), s.type),
        dg(tokens(s.HV, s.K), kFp32),
        dbeta(tokens(s.HV, 1), kFp32),
        units(static_cast<std::size_t>(2 * chunks_ * s.HV * (s.V / kGradColumns)), kFp32) {
    fill();
    for (Buffer* b : {&q, &k, &v, &g, &beta, &grad_o, &h, &dh, &units}) b->upload();
    for (int c = 0; c < chunks_; ++c) {
      for (int hv = 0; hv < s.HV; ++hv) reference(c, hv);
    }
    for (Buffer* b : {&v_new, &R}) b->upload();
  }

  void run() {
    GradParams p;
    p.q = q.tensor(s_.T, s_.H, s_.K);
    p.k = k.tensor(s_.T, s_.H, s_.K);
    p.v = v.tensor(s_.T, s_.HV, s_.V);
    p.beta = beta.tensor(s_.T, s_.HV, 1);
    p.gate.g = g.tensor(s_.T, s_.HV, s_.K);
    p.grad_o = grad_o.tensor(s_.T, s_.HV, s_.V);
    p.v_new = v_new.tensor(s_.T, s_.HV, s_.V);
    p.R = R.tensor(s_.T, s_.HV, s_.V);
    p.h = h.tensor(s_.HV, s_.K, s_.V);
    p.dh = dh.tensor(s_.HV, s_.K, s_.V);
    p.dq = dq.tensor(s_.T, s_.HV, s_.K);
    p.dk = dk.tensor(s_.T, s_.HV, s_.K);
    p.dv = dv.tensor(s_.T, s_.HV, s_.V);
    p.dg = dg.tensor(s_.T, s_.HV, s_.K);
    p.dbeta = dbeta.tensor(s_.T, s_.HV, 1);
    p.sequences.count = 1;
    p.sequences.T = s_.T;
    p.sequences.C = kTokens;
    p.sequences.chunk_rows = p.sequences.chunks_per_row = chunks_;
    if (s_.type == kFp16) p.units = static_cast<const float*>(units.device);
    p.heads = {s_.H, s_.HV, s_.HV / s_.H, s_.V, s_.K};
    p.scale = static_cast<float>(kScale);
    p.mantissa = static_cast<float>(kMantissa);
    p.qk_l2norm = p.undo_l2norm = s_.norm;
    p.most_blocks = kBlocks;
    p.record_sequences = p.sequences;
    p.record_sequences.C = kChunk;
    p.record_sequences.chunk_rows = p.record_sequences.chunks_per_row =
        (s_.T + kChunk - 1) / kChunk;
    PrepParams prep;
    prep.q = p.q;
    prep.k = p.k;
    prep.beta = p.beta;
    prep.gate = p.gate;
    prep.sequences = p.record_sequences;
    prep.heads = p.heads;
    prep.qk_l2norm = s_.norm;
    const int64_t record = s_.K == 64 ? Record<64>::kBytes : Record<128>::kBytes;
    const DeviceMemory records(prep.sequences.chunk_rows * s_.HV * record);
    const DeviceMemory carry(kBlocks * grad_carry_bytes(s_.K));
    p.records = prep.records = static_cast<std::byte*>(records.data);
    p.carry = static_cast<float4*>(carry.data);
    const Status prepared = launch_prep(prep, false, nullptr);
    ASSERT_TRUE(prepared.ok()) << prepared.message();
    const Status status = launch_grad(p, false, nullptr);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }

  /// (7.1) over everything and over each chunk, against the targets of 7.3.
  void check() const {
    const bool fp16 = s_.type == kFp16;
    const double limit = fp16 ? 1e-3 : 6e-3;
    check("dq", dq, s_.K, limit);
    check("dk", dk, s_.K, limit);
    check("dv", dv, s_.V, limit);
    check("dg", dg, s_.K, fp16 ? 3e-3 : 1e-2);
    check("dbeta", dbeta, 1, fp16 ? 1e-3 : 8e-3);
  }

 private:
  static constexpr double kScale = 0.3;
  static constexpr double kMantissa = 1.2;  ///< 0.3 = 1.2 2^-2

  std::size_t tokens(int heads, int columns) const {
    return static_cast<std::size_t>(s_.T) * static_cast<std::size_t>(heads * columns);
  }
  std::size_t states() const {
    return static_cast<std::size_t>(chunks_ * s_.HV) * static_cast<std::size_t>(s_.K * s_.V);
  }

  /// What 1 in R is worth at a token; in fp16 every chunk and 64 columns have another unit.
  double& unit_of(int token, int hv, int column) {
    const int tiles = s_.V / kGradColumns;
    return units.host[static_cast<std::size_t>((token / kChunk * s_.HV + hv) * tiles +
                                               column / kGradColumns)];
  }
  /// The same in dh: that of the pair's last chunk.
  double unit_behind(int pair, int hv, int column) {
    return unit_of(std::min((pair + 1) * kTokens, s_.T) - 1, hv, column);
  }

  void fill() {
    for (std::size_t i = 0; i < units.host.size(); ++i) {
      const int exponent = s_.type == kFp16 ? 5 - static_cast<int>(i * 7 % 11) : 0;
      units.host[i] = std::ldexp(kMantissa, exponent);
    }
    std::mt19937 random(7);
    std::normal_distribution<double> normal;
    std::uniform_real_distribution<double> uniform(0, 1);
    const double length = s_.norm ? 1 : 1 / std::sqrt(s_.K);
    for (double& x : q.host) x = normal(random) * length;
    for (double& x : k.host) x = normal(random) * length;
    for (double& x : v.host) x = normal(random);
    for (double& x : grad_o.host) x = normal(random);
    for (double& x : h.host) x = normal(random) * 0.3;
    for (std::size_t i = 0; i < dh.host.size(); ++i) {
      const auto columns = static_cast<std::size_t>(s_.V);
      const auto item = static_cast<int>(i / columns / static_cast<std::size_t>(s_.K));
      const double unit = unit_behind(item / s_.HV, item % s_.HV, static_cast<int>(i % columns));
      dh.host[i] = normal(random) * 0.3 * kMantissa / unit;
    }
    for (double& x : beta.host) x = uniform(random);
    for (double& x : g.host) x = s_.gate * std::pow(uniform(random), 4);
  }

  /// (2.1)-(2.13) of one chunk and value head.
  void reference(int chunk, int hv) {
    const int K = s_.K;
    const int V = s_.V;
    const int begin = chunk * kTokens;
    const int rows = std::min(kTokens, s_.T - begin);
    const int head = hv / (s_.HV / s_.H);
    const auto row = [](auto& b, int t, int heads, int at, int columns) {
      return b.host.data() + (static_cast<std::size_t>(t * heads + at)) * columns;
    };
    const std::size_t first = static_cast<std::size_t>(chunk * s_.HV + hv) * K * V;
    std::vector<Values> decayed;
    std::vector<Values> written;
    Values S(h.host.begin() + first, h.host.begin() + first + K * V);
    std::vector<Values> queries;
    std::vector<Values> keys;
    Values norms[2];
    const auto normalised = [&](const double* x, Values& norm) {
      double sum = 1e-6;
      for (int c = 0; c < K; ++c) sum += x[c] * x[c];
      norm.push_back(s_.norm ? 1 / std::sqrt(sum) : 1);
      Values y(x, x + K);
      for (double& e : y) e *= norm.back();
      return y;
    };
    for (int t = begin; t < begin + rows; ++t) {
      queries.push_back(normalised(row(q, t, s_.H, head, K), norms[0]));
      keys.push_back(normalised(row(k, t, s_.H, head, K), norms[1]));
      const Values& key = keys.back();
      const double* gate = row(g, t, s_.HV, hv, K);
      for (int i = 0; i < K * V; ++i) S[i] *= std::exp(std::max(gate[i / V], -40.0));
      decayed.push_back(S);
      double* u = row(v_new, t, s_.HV, hv, V);
      for (int j = 0; j < V; ++j) {
        u[j] = row(v, t, s_.HV, hv, V)[j];
        for (int c = 0; c < K; ++c) u[j] -= S[c * V + j] * key[c];
        u[j] *= row(beta, t, s_.HV, hv, 1)[0];
      }
      for (int i = 0; i < K * V; ++i) S[i] += key[i / V] * u[i % V];
      written.push_back(S);
    }
    Values D(dh.host.begin() + first, dh.host.begin() + first + K * V);
    for (int i = 0; i < K * V; ++i) D[i] *= unit_behind(chunk, hv, i % V);
    for (int t = begin + rows - 1; t >= begin; --t) {
      const Values& key = keys[t - begin];
      const Values& St = decayed[t - begin];
      const double* d_o = row(grad_o, t, s_.HV, hv, V);
      const double* u = row(v_new, t, s_.HV, hv, V);
      const double b = row(beta, t, s_.HV, hv, 1)[0];
      double* x = row(dq, t, s_.HV, hv, K);
      double* y = row(dk, t, s_.HV, hv, K);
      double* z = row(dg, t, s_.HV, hv, K);
      for (int c = 0; c < K; ++c) {
        x[c] = 0;
        for (int j = 0; j < V; ++j) {
          D[c * V + j] += kScale * queries[t - begin][c] * d_o[j];
          x[c] += kScale * written[t - begin][c * V + j] * d_o[j];
        }
      }
      double* r = row(R, t, s_.HV, hv, V);
      double& db = row(dbeta, t, s_.HV, hv, 1)[0];
      db = 0;
      for (int j = 0; j < V; ++j) {
        double du = 0;
        double e = row(v, t, s_.HV, hv, V)[j];
        for (int c = 0; c < K; ++c) {
          du += D[c * V + j] * key[c];
          e -= St[c * V + j] * key[c];
        }
        db += du * e;
        r[j] = du / unit_of(t, hv, j);
        row(dv, t, s_.HV, hv, V)[j] = b * du;
      }
      for (int c = 0; c < K; ++c) {
        y[c] = z[c] = 0;
        const double decay = std::exp(std::max(row(g, t, s_.HV, hv, K)[c], -40.0));
        for (int j = 0; j < V; ++j) {
          const double de = b * r[j] * unit_of(t, hv, j);
          y[c] += D[c * V + j] * u[j] - St[c * V + j] * de;
          const double Dt = D[c * V + j] - key[c] * de;
          z[c] += St[c * V + j] * Dt;
          D[c * V + j] = decay * Dt;
        }
      }
      undo_norm(x, queries[t - begin], norms[0][t - begin]);
      undo_norm(y, key, norms[1][t - begin]);
    }
  }

  /// (3.3).
  void undo_norm(double* dx, const Values& y, double r) const {
    if (!s_.norm) return;
    double sum = 0;
    for (int c = 0; c < s_.K; ++c) sum += y[c] * dx[c];
    for (int c = 0; c < s_.K; ++c) dx[c] = r * (dx[c] - y[c] * sum);
  }

  void check(const char* name, const Buffer& b, int columns, double limit) const {
    const Values found = b.download();
    const auto ratio = [&](std::size_t begin, std::size_t end) {
      double error = 0;
      double norm = 0;
      for (std::size_t i = begin; i < end; ++i) {
        error += (found[i] - b.host[i]) * (found[i] - b.host[i]);
        norm += b.host[i] * b.host[i];
      }
      return std::sqrt(error) / (std::sqrt(norm) + 1e-8);
    };
    EXPECT_LT(ratio(0, found.size()), limit) << name;
    ::testing::Test::RecordProperty(name, std::to_string(ratio(0, found.size())));
    const std::size_t step = static_cast<std::size_t>(kTokens * s_.HV) * columns;
    for (std::size_t i = 0; i < found.size(); i += step) {
      EXPECT_LT(ratio(i, std::min(i + step, found.size())), 4 * limit)
          << name << ", chunk " << i / step;
    }
  }

  Shape s_;
  int chunks_;
  Buffer q, k, v, g, beta, grad_o, v_new, R, h, dh, dq, dk, dv, dg, dbeta, units;
};

class Sm90ChunkGrad : public ::testing::TestWithParam<Shape> {};

TEST_P(Sm90ChunkGrad, EqualsTheTokenRecurrence) {
  KDA_NEEDS_HOPPER();
  Gradient gradient(GetParam());
  gradient.run();
  gradient.check();
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, Sm90ChunkGrad,
    ::testing::Values(Shape{64, 64, 32, 1, 1, 0}, Shape{128, 128, 64, 1, 1, 0},
                      Shape{128, 128, 64, 1, 1, -5}, Shape{64, 128, 139, 1, 2, -2},
                      Shape{128, 64, 17, 2, 2, -1}, Shape{128, 192, 50, 1, 2, -5},
                      Shape{64, 256, 33, 2, 2, -1}, Shape{128, 128, 64, 1, 1, -30},
                      Shape{64, 64, 47, 1, 1, -100}, Shape{128, 128, 134, 2, 2, -3, true},
                      Shape{64, 128, 134, 2, 2, -3, true, false},
                      Shape{128, 128, 104, 1, 1, -3, true, false},
                      Shape{64, 128, 139, 1, 2, -2, false, true, kFp16},
                      Shape{128, 192, 50, 1, 2, -5, false, true, kFp16},
                      Shape{128, 128, 64, 1, 1, -30, false, true, kFp16},
                      Shape{64, 64, 47, 1, 1, -100, false, true, kFp16},
                      Shape{64, 128, 134, 2, 2, -3, true, false, kFp16},
                      Shape{128, 128, 104, 1, 1, -3, true, false, kFp16}));

}  // namespace
}  // namespace kda::cuda::sm90
