// What depends on what: public headers are light, layers point downwards.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace {

namespace fs = std::filesystem;

struct Include {
  std::string file;  // relative to the root of the sources
  int line = 0;
  std::string target;
  bool system = false;  // <...>
};

bool is_source(const fs::path& path) {
  const std::string extension = path.extension().string();
  for (const char* known : {".h", ".cpp", ".cc", ".c", ".cu", ".cuh", ".inc"}) {
    if (extension == known) return true;
  }
  return false;
}

/// What a line includes; an empty target if it is no #include.
Include parse(const std::string& line) {
  std::istringstream words(line);
  char hash = 0;
  std::string directive;
  if (!(words >> hash) || hash != '#' || !(words >> directive)) return {};
  // Both `#include <x>` and `#include<x>`.
  const std::size_t begin = line.find_first_of("<\"");
  if (directive.rfind("include", 0) != 0 || begin == std::string::npos) return {};
  const bool system = line[begin] == '<';
  const std::size_t end = line.find(system ? '>' : '"', begin + 1);
  if (end == std::string::npos) return {};
  return {"", 0, line.substr(begin + 1, end - begin - 1), system};
}

std::vector<Include> includes_under(const std::string& folder) {
  const fs::path root = KDA_SOURCE_DIR;
  std::vector<Include> found;
  if (!fs::exists(root / folder)) return found;
  for (const auto& entry : fs::recursive_directory_iterator(root / folder)) {
    if (!entry.is_regular_file() || !is_source(entry.path())) continue;
    std::ifstream file(entry.path());
    int number = 0;
    for (std::string line; std::getline(file, line);) {
      ++number;
      Include include = parse(line);
      if (include.target.empty()) continue;
      include.file = fs::relative(entry.path(), root).string();
      include.line = number;
      found.push_back(include);
    }
  }
  return found;
}

bool starts_with(const std::string& text, const std::string& prefix) {
  return text.rfind(prefix, 0) == 0;
}

std::string where(const Include& include) {
  return include.file + ":" + std::to_string(include.line) + " includes " + include.target;
}

TEST(Includes, PublicHeadersUseOnlyTheStandardLibraryAndEachOther) {
  const auto includes = includes_under("include");
  ASSERT_FALSE(includes.empty());
  for (const Include& include : includes) {
    if (include.system) {
      // A standard header has neither folder nor, save C's two, a suffix.
      const bool c_header = include.target == "stdint.h" || include.target == "stddef.h";
      EXPECT_TRUE(c_header || include.target.find_first_of("./") == std::string::npos)
          << where(include);
    } else {
      EXPECT_TRUE(starts_with(include.target, "kda/")) << where(include);
    }
  }
}

TEST(Includes, TheCHeaderIsC) {
  for (const Include& include : includes_under("include")) {
    if (include.file != "include/kda/c_api.h") continue;
    EXPECT_TRUE(include.target == "stdint.h" || include.target == "stddef.h") << where(include);
  }
}

TEST(Includes, CoreKnowsBackendsOnlyInItsList) {
  const auto includes = includes_under("src/core");
  ASSERT_FALSE(includes.empty());
  for (const Include& include : includes) {
    if (include.file == "src/core/backend.cpp") continue;
    EXPECT_FALSE(starts_with(include.target, "cpu/") || starts_with(include.target, "cuda/") ||
                 starts_with(include.target, "cuda"))
        << where(include);
  }
}

TEST(Includes, BackendsDoNotKnowEachOther) {
  for (const Include& include : includes_under("src/cpu")) {
    EXPECT_FALSE(starts_with(include.target, "cuda")) << where(include);
  }
  for (const Include& include : includes_under("src/cuda")) {
    EXPECT_FALSE(starts_with(include.target, "cpu/")) << where(include);
  }
}

TEST(Includes, ArchitecturesDoNotKnowEachOther) {
  for (const Include& include : includes_under("src/cuda")) {
    const bool in_sm80 = include.file.find("/sm80/") != std::string::npos;
    const bool in_sm90 = include.file.find("/sm90/") != std::string::npos;
    EXPECT_FALSE(in_sm80 && include.target.find("sm90/") != std::string::npos) << where(include);
    EXPECT_FALSE(in_sm90 && include.target.find("sm80/") != std::string::npos) << where(include);
    const bool shared = include.file.find("/ptx/") != std::string::npos ||
                        include.file.find("/tile/") != std::string::npos;
    EXPECT_FALSE(shared && (include.target.find("sm80/") != std::string::npos ||
                            include.target.find("sm90/") != std::string::npos))
        << where(include);
  }
}

TEST(Includes, TheLibraryHasNoToolOrFrameworkHeader) {
  for (const Include& include : includes_under("src")) {
    for (const char* foreign : {"torch", "ATen", "c10", "Python", "pybind11", "nanobind",
                                "nlohmann", "CLI/", "gtest", "benchmark", "tools/", "tests/"}) {
      EXPECT_FALSE(starts_with(include.target, foreign)) << where(include);
    }
  }
}

TEST(Includes, UsersSitOnThePublicHeaders) {
  for (const char* folder : {"tools", "python", "bench", "examples"}) {
    for (const Include& include : includes_under(folder)) {
      // <cuda/...> is libcu++; rates of instructions are measured through the library's wrappers.
      const bool wrapper =
          starts_with(include.target, "cuda/ptx/") || starts_with(include.target, "cuda/tile/");
      if (include.system || (wrapper && starts_with(include.file, "bench/cuda/"))) continue;
      EXPECT_FALSE(starts_with(include.target, "core/") || starts_with(include.target, "cpu/") ||
                   starts_with(include.target, "cuda/"))
          << where(include);
    }
  }
}

// What only some compilers or systems have stands behind a macro or in the places listed here, so
// that another system needs these alone. Kernels are compiled by nvcc everywhere.
TEST(Includes, INSTALL_05_SourcesArePortable) {
  const fs::path root = KDA_SOURCE_DIR;
  const std::vector<std::string> known = {
      "include/kda/c_api.h: __attribute__",  // only where __GNUC__ is defined
      "src/cpu/cpu_info.cpp: <unistd.h>",    // how much memory there is
      "src/cpu/team.cpp: <pthread.h>",       // where fork exists
  };
  int files = 0;
  for (const char* folder : {"include", "src/core", "src/cpu", "src/cuda"}) {
    for (const auto& entry : fs::recursive_directory_iterator(root / folder)) {
      const std::string extension = entry.path().extension().string();
      if (extension != ".h" && extension != ".cpp" && extension != ".cc") continue;
      ++files;
      std::ostringstream text;
      text << std::ifstream(entry.path()).rdbuf();
      for (const char* word :
           {"__attribute__", "__builtin_", "__int128", "__PRETTY_FUNCTION__", "ssize_t", "asm(",
            "asm volatile", "<unistd.h>", "<sys/", "<pthread.h>", "<alloca.h>", "typeof("}) {
        if (text.str().find(word) == std::string::npos) continue;
        const std::string found = fs::relative(entry.path(), root).string() + ": " + word;
        EXPECT_NE(std::find(known.begin(), known.end(), found), known.end()) << found;
      }
    }
  }
  EXPECT_GT(files, 50);
}

}  // namespace
