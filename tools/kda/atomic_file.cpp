#include "atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>

#include <fmt/format.h>

namespace kda::cases {

namespace fs = std::filesystem;

AtomicFile::~AtomicFile() { discard(); }

void AtomicFile::discard() {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
  temporary_.clear();
}

Status AtomicFile::fail(const char* what, int error) {
  discard();
  return {StatusCode::kInvalidArgument,
          fmt::format("{}: cannot {} ({}), expected a writable place", path_, what,
                      std::generic_category().message(error))};
}

Status AtomicFile::open(const std::string& path) {
  std::error_code ignored;
  path_ = path;
  // A link is followed so that the file behind it is replaced; a device or pipe is never renamed
  // over.
  const fs::path target = fs::weakly_canonical(path, ignored);
  if (!target.empty()) path_ = target.string();
  const auto kind = fs::status(path_, ignored).type();
  if (kind != fs::file_type::not_found && kind != fs::file_type::regular) {
    return {StatusCode::kInvalidArgument,
            fmt::format("{}: found something that is no regular file, expected a file or nothing",
                        path)};
  }
  for (int attempt = 0; attempt < 100; ++attempt) {
    const std::string name = fmt::format("{}.{}-{}.tmp", path_, ::getpid(), attempt);
    descriptor_ = ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor_ >= 0) {
      temporary_ = name;
      return {};
    }
    if (errno != EEXIST) break;
  }
  return fail("create a file beside it", errno);
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
  struct stat old {};
  if (::stat(path_.c_str(), &old) == 0) (void)::fchmod(descriptor_, old.st_mode & 07777);
  if (::fsync(descriptor_) != 0) return fail("flush", errno);
  const int closed = ::close(descriptor_);
  descriptor_ = -1;
  if (closed != 0) return fail("close", errno);
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0) return fail("rename", errno);
  temporary_.clear();
  return {};
}

}  // namespace kda::cases
