// What an implementation provides: a row in the ordered list and a ready-to-run object.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "kda/plan.h"
#include "kda/problem.h"
#include "kda/status.h"

namespace kda {

/// A validated problem bound to an implementation. Immutable after creation: run is called from
/// many threads at once.
class Executor {
 public:
  Executor(Problem problem, Device device) : problem_(std::move(problem)), device_(device) {}
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;
  virtual ~Executor() = default;

  const Problem& problem() const { return problem_; }
  const Device& device() const { return device_; }
  std::string_view name() const { return name_; }
  void set_name(std::string_view name) { name_ = name; }

  virtual std::size_t workspace_bytes() const = 0;
  /// `args` passed check_args. CPU implementations ignore `stream`.
  virtual Status run(const Args& args, void* stream) const = 0;

 private:
  Problem problem_;
  Device device_;
  std::string_view name_;
};

/// One row of the ordered list.
struct Implementation {
  std::string_view name;    ///< family + "_" + stem, for example "cpu_chunk_fwd"
  std::string_view family;  ///< "cpu", "reference"
  Operation operation;
  DeviceType device;
  std::string_view features;  ///< What it takes, for `kda support` and the documentation.
  /// The executor, or kUnsupported naming the missing feature. The problem is validated. Allocates
  /// no tensor memory, so that asking "is it supported" is this very call. In `options` the
  /// implementation is the caller's or the environment's choice; empty: nobody chose. A workspace
  /// above their limit is the least that the row can do with: make_plan refuses it.
  Result<std::unique_ptr<Executor>> (*create)(const Problem& problem, const Device& device,
                                              const Options& options);
};

/// All rows of this build, fastest first for each operation and device.
std::span<const Implementation> all_implementations();

/// Rows of the backends; all_implementations concatenates them in this order.
std::span<const Implementation> cpu_implementations();
std::span<const Implementation> reference_implementations();

/// The checks of addresses that precede every run: presence, alignment, workspace, overlap.
Status check_args(const Problem& problem, const Args& args, std::size_t workspace_bytes,
                  std::size_t workspace_alignment);

}  // namespace kda
