// The program kda: reads the command line and hands over to a command.
#include <algorithm>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <limits>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>

#include <CLI/CLI.hpp>

#include "atomic_file.h"
#include "command.h"
#include "kda/version.h"

namespace kda::program {
namespace {

constexpr const char* kExitCodes =
    "Exit codes: 0 right, 1 mismatch, 2 bad usage or bad file, 3 unsupported here, 4 device error";

struct Commands {
  RunCommand run;
  VerifyCommand verify;
  BenchCommand bench;
  SupportCommand support;
  Common doctor;
  StressCommand stress;
};

constexpr const char* kShape =
    "B,T,H,HV,K,V: batch, tokens, heads of q and k, heads of v, sizes of a head of k and of v";

/// `of_auto`: what --device auto means to the command.
void add_common(CLI::App& app, Common& common,
                const char* of_auto = "a GPU if it can, else the CPU") {
  app.add_flag("--json", common.json, "Print one JSON object a line and nothing else");
  app.add_option("--device", common.device,
                 std::string("cpu, cuda, cuda:NUMBER or auto (") + of_auto + ")")
      ->capture_default_str();
  app.add_option("--impl", common.implementation,
                 "Implementations to use: a family or names, with commas between, as kda support "
                 "lists them; no other row is taken");
  app.add_option("--threads", common.threads, "CPU threads; 0 for all")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
}

/// The whole text as a number of the type, if it holds it.
template <class Number>
std::optional<Number> number_of(const std::string& text) {
  Number value{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stop != end) return std::nullopt;
  return value;
}

/// The conversion by CLI11 clamps what int64 cannot hold.
std::string check_integer(const std::string& text) {
  if (number_of<int64_t>(text)) return "";
  return "found " + text + ", expected an integer that fits 64 bits";
}

/// The same for what has no sign.
std::string check_unsigned(const std::string& text) {
  if (number_of<uint64_t>(text)) return "";
  return "found " + text + ", expected an integer from 0 to 2^64 - 1";
}

/// What an unset variable of a shell leaves.
std::string check_file_name(const std::string& text) {
  return text.empty() ? "found an empty name, expected the name of a file" : "";
}

/// CLI::Range takes NaN.
std::string check_seconds(const std::string& text) {
  const std::optional<double> value = number_of<double>(text);
  if (value && *value >= 0.001 && *value <= 1e9) return "";
  return "found " + text + ", expected a number from 0.001 to 1e9";
}

void add_workspace_limit(CLI::App& app, Common& common) {
  app.add_option("--workspace-limit", common.workspace_limit,
                 "Bytes of workspace that a call may use; 0: KDA_WORKSPACE_LIMIT, else no limit")
      ->check(check_unsigned)
      ->capture_default_str();
}

void add_types(CLI::App& app, std::string& dtype, std::string& gate) {
  app.add_option("--dtype", dtype, "Of q, k, v and o: bf16, fp16, fp32 or fp64")
      ->capture_default_str();
  app.add_option("--gate", gate, "How g becomes the decay: none, softplus or lower_bound")
      ->capture_default_str();
}

void add_run(CLI::App& app, RunCommand& command) {
  CLI::App* sub = app.add_subcommand("run", "Compute a case file and write the results");
  sub->footer(
      "Computes o and final_state; with `do` in the case, every gradient too.\n\n"
      "Example: kda run case.safetensors -o out.safetensors --device cpu --dtype fp64");
  sub->add_option("CASE", command.case_path, "Case file (safetensors; docs/case-format.md)")
      ->required()
      ->check(check_file_name);
  sub->add_option("-o,--out", command.out_path, "Result file; replaced whole or not at all")
      ->required();
  sub->add_option(
      "--dtype", command.dtype,
      "Round q, k, v and do to bf16, fp16, fp32 or fp64; outputs follow, and fp64 makes "
      "every output fp64");
  add_common(*sub, command.common);
  add_workspace_limit(*sub, command.common);
}

void add_verify(CLI::App& app, VerifyCommand& command) {
  CLI::App* sub = app.add_subcommand("verify", "Compare results with exact ones");
  sub->footer(
      "Exact are the `expected.*` of a case, or the float64 reference. Every output is held to "
      "its\n"
      "limit: the ratio RMS(error) / RMS(exact) of the whole tensor, and four times the limit for\n"
      "each block of 64 tokens of a head. Where the reference itself runs, its largest error is\n"
      "held.\n\n"
      "Example: kda verify cases/*.safetensors --impl cpu --json");
  sub->add_option("CASE", command.case_paths, "Case files; without any a suite made from seeds")
      ->check(check_file_name);
  add_common(*sub, command.common);
}

void add_bench(CLI::App& app, BenchCommand& command) {
  CLI::App* sub = app.add_subcommand("bench", "Time operations from a cold cache");
  sub->footer(
      "Bytes count every tensor once; FLOP are those of the chunked form. The copy bandwidth is "
      "measured in\nthe same run. With neither --shape nor --suite: suite train.\n\n"
      "Example: kda bench --shape 1,4096,4,4,128,128 --dtype fp32 --device cpu");
  sub->add_option_function<std::vector<int64_t>>(
         "--shape",
         [&command](const std::vector<int64_t>& shape) { command.shapes.push_back(shape); },
         std::string(kShape) + "; may be given more than once")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(check_integer)
      ->trigger_on_parse();
  add_types(*sub, command.dtype, command.gate);
  sub->add_option(
      "--suite", command.suite,
      "train (forward, backward), prefill (forward), decode (state in place and in a pool with "
      "skipped sequences, one token; on CUDA 1, 4 and 8), stages or host (what a call costs its "
      "thread); at each --shape if given");
  sub->add_option(
         "--lengths", command.lengths,
         "Lengths of packed sequences, with commas between: cu_seqlens for the one --shape, "
         "whose T is their sum")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(check_integer);
  sub->add_flag("--checkpoints", command.checkpoints,
                "Suite train: the forward writes h, the states every 64 tokens, and the backward "
                "reads it");
  sub->add_option("--repeat", command.repeat, "Timed runs, fewer if they take over 10 s")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  add_common(*sub, command.common);
  add_workspace_limit(*sub, command.common);
}

void add_support(CLI::App& app, SupportCommand& command) {
  CLI::App* sub = app.add_subcommand("support", "List implementations, and which one is chosen");
  sub->footer(
      "With --shape: for each operation, which implementation is chosen and why each other one is\n"
      "not. Options about a problem, such as --dtype and --pool, go with it.\n\n"
      "Example: kda support --shape 1,4096,32,32,128,128 --gate softplus --operation chunk_fwd");
  sub->add_option("--shape", command.shape, kShape)
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(check_integer);
  add_types(*sub, command.dtype, command.gate);
  sub->add_option(
      "--operation", command.operation,
      "This one alone: chunk_fwd, chunk_bwd, recurrent or a stage, as the list has them");
  sub->add_option("--sequences", command.sequences,
                  "Number of packed sequences (cu_seqlens); 0: none")
      ->check(check_integer);
  sub->add_option("--chunk-size", command.chunk_size, "64 or 32")->capture_default_str();
  sub->add_flag("--qk-l2norm", command.qk_l2norm, "Normalise q and k inside");
  sub->add_flag("--beta-sigmoid", command.beta_sigmoid, "beta holds logits");
  sub->add_flag("--state-v-first", command.state_v_first, "States are [..., V, K]");
  sub->add_option("--state-dtype", command.state_dtype,
                  "bf16, fp16, fp32 or fp64; without it fp32, fp64 with --dtype fp64");
  sub->add_option("--pool", command.pool,
                  "States in a pool of so many, addressed by state_indices and updated in place "
                  "(recurrent alone); 0: none")
      ->check(check_integer);
  add_common(*sub, command.common);
  add_workspace_limit(*sub, command.common);
}

void add_doctor(CLI::App& app, Common& common) {
  CLI::App* sub = app.add_subcommand("doctor", "Describe this machine and test the library on it");
  sub->footer("Paste the block in a bug report.\n\nExample: kda doctor");
  add_common(*sub, common, "every device here");
}

void add_stress(CLI::App& app, StressCommand& command) {
  CLI::App* sub =
      app.add_subcommand("stress", "Try random problems on every implementation that takes them");
  sub->footer(
      "Draws operation, sizes, dtypes, options, tensors, strides and kinds of inputs from the "
      "seed.\n"
      "Each problem runs on every implementation that takes it and is held to the limits of kda\n"
      "verify, among memory full of NaN that it may not read or write, with other numbers of\n"
      "threads and, on CUDA, on several streams and as a graph. A failure prints the command that\n"
      "repeats it. Ctrl-C or SIGTERM ends it after the problem in hand, with the table of what "
      "was\n"
      "found; a second one at once. KDA_IMPL and KDA_WORKSPACE_LIMIT change nothing.\n\n"
      "Example: kda stress --seconds 60 --seed 7");
  sub->add_option("--seed", command.seed, "The same seed gives the same problems everywhere")
      ->check(check_unsigned)
      ->capture_default_str();
  CLI::Option* seconds = sub->add_option("--seconds", command.seconds, "Stop after so many seconds")
                             ->check(check_seconds)
                             ->capture_default_str();
  seconds->each([&command](const std::string&) { command.seconds_given = true; });
  CLI::Option* problems =
      sub->add_option("--problems", command.problems,
                      "Stop after so many problems; without --seconds, however long they take")
          ->check(check_integer)
          ->check(CLI::Range(int64_t{1}, std::numeric_limits<int64_t>::max()));
  sub->add_option("--case", command.number, "Try only the problem of this number (from 0)")
      ->check(check_integer)
      ->check(CLI::Range(int64_t{0}, std::numeric_limits<int64_t>::max()))
      ->excludes(seconds)
      ->excludes(problems);
  add_common(*sub, command.common, "every device here");
}

int bad_usage(const CLI::ParseError& error, bool json) {
  Common common;
  common.json = json;
  std::string text = error.what();
  std::replace(text.begin(), text.end(), '\n', ' ');
  return fail(common, "", {StatusCode::kInvalidArgument, text + " (kda --help tells more)"});
}

/// CLI11 only misses a subcommand where a word is none.
Status check_command(const CLI::App& app, int argc, char** argv) {
  const std::string word = argc > 1 ? argv[1] : "-";
  std::string names;
  for (const CLI::App* sub : app.get_subcommands({})) {
    if (word == sub->get_name()) return {};
    names += (names.empty() ? "" : ", ") + sub->get_name();
  }
  if (!word.empty() && word[0] == '-') return {};
  return {StatusCode::kInvalidArgument, "found command \"" + word + "\", expected one of " + names};
}

/// OpenMP runtimes call exit(1) where they cannot start their threads; 1 means a mismatch here.
struct Ending {
  bool by_main = false;
  Common common;
};
Ending ending;

void exit_as_device_failure() {
  if (ending.by_main) return;
  (void)fail(ending.common, "",
             {StatusCode::kDeviceError,
              "threads: the OpenMP runtime gave up; --threads 1 needs no further thread"});
  std::fflush(nullptr);
  std::_Exit(kDeviceFailure);
}

/// The command as it was typed: what needs quotes in a shell has them, and the program no folder.
std::string command_line(int argc, char** argv) {
  constexpr std::string_view kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=+.,:/@%";
  std::string line = "kda";
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    const bool plain = !word.empty() && word.find_first_not_of(kPlain) == std::string_view::npos;
    line += plain ? " " : " '";
    for (const char c : word) line += c == '\'' ? std::string("'\\''") : std::string(1, c);
    if (!plain) line += "'";
  }
  return line;
}

int dispatch(const CLI::App& app, const Commands& commands) {
  if (app.got_subcommand("run")) return run(commands.run);
  if (app.got_subcommand("verify")) return verify(commands.verify);
  if (app.got_subcommand("bench")) return bench(commands.bench);
  if (app.got_subcommand("support")) return support(commands.support);
  if (app.got_subcommand("stress")) return stress(commands.stress);
  return doctor(commands.doctor);
}

/// Standard output is gone, so only stderr can say so.
int output_lost() {
  std::fputs("kda: standard output: cannot be written\n", stderr);
  return kBadInput;
}

int run_program(int argc, char** argv) {
  const bool json = std::find(argv, argv + argc, std::string("--json")) != argv + argc;
  Common common;
  common.json = json;
  Commands commands;
  commands.bench.line = commands.stress.line = command_line(argc, argv);
  CLI::App app{"Kimi Delta Attention: compute, verify and time it", "kda"};
  app.footer(std::string(kExitCodes) +
             "\n\nEach command has a --help of its own.\n\nExample: kda verify");
  app.set_version_flag("--version", std::string("kda ") + version());
  app.require_subcommand(1);
  add_run(app, commands.run);
  add_verify(app, commands.verify);
  add_bench(app, commands.bench);
  add_support(app, commands.support);
  add_doctor(app, commands.doctor);
  add_stress(app, commands.stress);
  if (Status status = check_command(app, argc, argv); !status.ok()) {
    return fail(common, "", status);
  }
  ending.common = common;
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    return bad_usage(error, json);
  }
  try {
    return dispatch(app, commands);
  } catch (const std::system_error& error) {  // from fmt::print if it lost the output
    if (std::ferror(stdout) != 0) return output_lost();
    return fail(common, "", {StatusCode::kDeviceError, error.what()});
  } catch (const std::bad_alloc&) {
    return fail(common, "", {StatusCode::kOutOfMemory, "no memory for the tensors"});
  } catch (const std::length_error&) {
    return fail(common, "", {StatusCode::kOutOfMemory, "no memory for the tensors"});
  } catch (const std::exception& error) {
    return fail(common, "", {StatusCode::kInternal, error.what()});
  }
}

}  // namespace
}  // namespace kda::program

int main(int argc, char** argv) {
  namespace program = kda::program;
  std::signal(SIGXFSZ, SIG_IGN);  // a file too large is an error of the write
  (void)std::atexit(program::exit_as_device_failure);
  kda::cases::remove_temporary_file_at_exit();  // so registered last, called first
  try {
    const int code = program::run_program(argc, argv);
    program::ending.by_main = true;
    const bool lost = std::fflush(stdout) != 0 || std::ferror(stdout) != 0;
    return lost && code == program::kRight ? program::output_lost() : code;
  } catch (...) {  // only reporting a failure is left to fail
    program::ending.by_main = true;
    return program::output_lost();
  }
}
