#include "atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>

#include <fmt/format.h>

namespace kda::cases {

namespace fs = std::filesystem;

namespace {

/// The temporary file that has a name, where a signal handler finds it.
struct NamedTemporary {
  std::array<char, PATH_MAX> name;
  volatile std::sig_atomic_t exists;
};
NamedTemporary named_temporary{};

void remove_named_temporary() {
  if (named_temporary.exists != 0) ::unlink(named_temporary.name.data());
  named_temporary.exists = 0;
}

void note_temporary(const std::string& name) {
  named_temporary.exists = 0;
  if (name.empty() || name.size() >= named_temporary.name.size()) return;
  std::memcpy(named_temporary.name.data(), name.c_str(), name.size() + 1);
  named_temporary.exists = 1;
}

extern "C" void remove_and_end(int signal) {
  remove_named_temporary();
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

/// The path behind links, whether something is there or not. Empty if the links never end.
std::string behind_links(const std::string& path) {
  constexpr int kMostLinks = 40;  // as many as Linux follows
  fs::path target = path;
  std::error_code error;
  for (int i = 0; i < kMostLinks; ++i) {
    const fs::path next = fs::read_symlink(target, error);
    if (error) return target.string();
    target = target.parent_path() / next;  // an absolute one replaces all
  }
  return "";
}

/// Short, so that the longest name of a file leaves room for it.
std::string temporary_name(const std::string& directory, int attempt) {
  return fmt::format("{}/.kda-{}-{}.tmp", directory, ::getpid(), attempt);
}

constexpr int kAttempts = 100;

}  // namespace

void remove_temporary_file_at_exit() {
  for (const int signal : {SIGHUP, SIGINT, SIGTERM}) {
    // What was ignored (nohup) stays so.
    if (std::signal(signal, remove_and_end) == SIG_IGN) std::signal(signal, SIG_IGN);
  }
  (void)std::atexit(remove_named_temporary);
}

AtomicFile::~AtomicFile() { discard(); }

void AtomicFile::discard() {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
  temporary_.clear();
  note_temporary("");
}

Status AtomicFile::fail(const char* what, int error) {
  discard();
  return {StatusCode::kInvalidArgument,
          fmt::format("{}: cannot {} ({}), expected a writable place", path_, what,
                      std::generic_category().message(error))};
}

Status AtomicFile::open(const std::string& path) {
  if (path.empty()) {
    return {StatusCode::kInvalidArgument, "found an empty name, expected the name of a file"};
  }
  path_ = behind_links(path);
  struct stat old {};
  const bool exists = !path_.empty() && ::stat(path_.c_str(), &old) == 0;
  if (path_.empty() || path_.back() == '/' || (exists && !S_ISREG(old.st_mode))) {
    return {StatusCode::kInvalidArgument,
            fmt::format("{}: found something that is no regular file, expected a file or nothing",
                        path)};
  }
  const fs::path parent = fs::path(path_).parent_path();
  directory_ = parent.empty() ? "." : parent.string();
  // Never readable by more people than the old file, not even for a moment.
  const int mode = exists ? static_cast<int>(old.st_mode & 0777) : 0666;
  if (!open_unnamed(mode) && !open_named(mode)) return fail("create a file beside it", errno);
  if (exists) (void)::fchmod(descriptor_, old.st_mode & 07777);
  return {};
}

bool AtomicFile::open_unnamed(int mode) {
  descriptor_ = ::open(directory_.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, mode);
  if (descriptor_ < 0) return false;
  // Naming the file later goes by this link.
  const std::string self = fmt::format("/proc/self/fd/{}", descriptor_);
  if (::access(self.c_str(), F_OK) == 0) return true;
  ::close(descriptor_);
  descriptor_ = -1;
  return false;
}

bool AtomicFile::open_named(int mode) {
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const std::string name = temporary_name(directory_, attempt);
    descriptor_ = ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (descriptor_ >= 0) {
      temporary_ = name;
      note_temporary(name);
      return true;
    }
    if (errno != EEXIST) break;
  }
  return false;
}

bool AtomicFile::name_it() {
  const std::string self = fmt::format("/proc/self/fd/{}", descriptor_);
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const std::string name = temporary_name(directory_, attempt);
    if (::linkat(AT_FDCWD, self.c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) == 0) {
      temporary_ = name;
      note_temporary(name);
      return true;
    }
    if (errno != EEXIST) break;
  }
  return false;
}

Status AtomicFile::write(const void* data, std::size_t bytes) {
  // Linux takes at most 2 GiB a call.
  constexpr std::size_t kPiece = std::size_t{1} << 30;
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const auto written = ::write(descriptor_, from, std::min(bytes, kPiece));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return fail("write", errno);
    from += written;
    bytes -= static_cast<std::size_t>(written);
  }
  return {};
}

Status AtomicFile::commit() {
  if (::fsync(descriptor_) != 0) return fail("flush", errno);
  // Only a file with a name can replace another in one step.
  if (temporary_.empty() && !name_it()) return fail("name the file", errno);
  const int closed = ::close(descriptor_);
  descriptor_ = -1;
  if (closed != 0) return fail("close", errno);
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0) return fail("rename", errno);
  temporary_.clear();
  note_temporary("");
  return {};
}

}  // namespace kda::cases
