// What the commands of the program share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "case.h"
#include "kda/backend.h"
#include "kda/plan.h"

namespace kda::program {

/// Exit codes; part of the interface.
enum ExitCode : int {
  kRight = 0,
  kMismatch = 1,
  kBadInput = 2,
  kUnsupportedHere = 3,
  kDeviceFailure = 4,
};

struct Common {
  bool json = false;
  std::string device = "auto";
  std::string implementation;
  int threads = 0;
  std::size_t workspace_limit = 0;

  Options options() const { return {implementation, threads, workspace_limit}; }
};

struct RunCommand {
  Common common;
  std::string case_path;
  std::string out_path;
  std::string dtype;
};

struct VerifyCommand {
  Common common;
  std::vector<std::string> case_paths;
};

struct BenchCommand {
  Common common;
  std::vector<std::vector<int64_t>> shapes;
  std::vector<int64_t> lengths;
  std::string suite;
  std::string dtype = "bf16";
  std::string gate = "softplus";
  int repeat = 15;
  bool checkpoints = false;
  std::string line;  ///< the command as it was typed, without the program's folder
};

struct SupportCommand {
  Common common;
  std::vector<int64_t> shape;
  std::string operation;
  std::string dtype = "bf16";
  std::string gate = "none";
  bool qk_l2norm = false;
  bool beta_sigmoid = false;
  bool state_v_first = false;
  std::string state_dtype;
  int64_t sequences = 0;
  int64_t pool = 0;
  int32_t chunk_size = 64;
};

struct StressCommand {
  Common common;
  uint64_t seed = 1;
  double seconds = 10;
  bool seconds_given = false;
  int64_t problems = 0;
  int64_t number = -1;  ///< the one problem to try; -1: all
  std::string line;     ///< as in BenchCommand
};

int run(const RunCommand& command);
int verify(const VerifyCommand& command);
int bench(const BenchCommand& command);
int support(const SupportCommand& command);
int doctor(const Common& common);
int stress(const StressCommand& command);

int exit_code_of(const Status& status);

/// Says why the program stops: one line on stderr, under --json also an object on stdout. Returns
/// the exit code. `subject` (a file or an argument) goes in front if it is not empty.
int fail(const Common& common, const std::string& subject, const Status& status);

/// The text on one line: control characters, which file names may hold, as \n or \x1b.
std::string printable(std::string_view text);

/// One JSON object on a line of stdout; text that is no UTF-8 is replaced.
void print_json(const nlohmann::json& object);

/// The device that the text names ("cpu", "cuda", "cuda:1"), here or not; "auto" is none.
Result<Device> parse_device(const std::string& text);

/// The device of --device, if it is here; "auto" is the first CUDA device if it
/// runs the problem, else the CPU.
Result<Device> choose_device(const Common& common, const Problem& problem);

/// Whether the device is here and the implementations of that name exist, for commands that may not
/// come to a problem.
Status check_common(const Common& common);

/// Whether --impl leaves the row: one of its words, between commas or spaces, is the name or
/// family, or it has no word.
bool is_chosen(const Common& common, const ImplementationInfo& info);

/// What a plan would refuse in KDA_WORKSPACE_LIMIT and, without --impl, in KDA_IMPL, whatever the
/// problem; for commands that make no plan on which these act.
Status check_environment(const Common& common);

/// "cpu", "cuda:0".
std::string name_of(const Device& device);

/// What a device is: "NVIDIA H200; compute capability 9.0; 132 SMs".
std::string machine_of(const Device& device);

/// The time in UTC, "2026-11-30T09:20:00Z".
std::string now();

/// "bf16" -> kBF16, for the dtypes of q; otherwise kInvalidArgument, which names the option.
Result<DType> parse_dtype(const std::string& text, std::string_view option = "--dtype");
Result<Gate> parse_gate(const std::string& text);
/// B,T,H,HV,K,V.
Result<Sizes> parse_shape(const std::vector<int64_t>& numbers);

/// "B1 T130 H2 HV2 K64 V64", packed sequences included.
std::string shape_text(const Problem& problem);

/// "reference_chunk_fwd" -> true.
bool is_reference(std::string_view implementation);

}  // namespace kda::program
