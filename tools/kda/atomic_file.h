// A file that appears whole or not at all.
#pragma once

#include <cstddef>
#include <string>

#include "kda/status.h"

namespace kda::cases {

/// Writes to a temporary file in the directory of `path` and renames it over `path` on commit.
/// Without a commit the temporary file is removed and `path` is as it was.
class AtomicFile {
 public:
  AtomicFile() = default;
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile();

  Status open(const std::string& path);
  Status write(const void* data, std::size_t bytes);
  /// Flushes to the disk and renames.
  Status commit();

 private:
  Status fail(const char* what, int error);
  void discard();

  std::string path_;
  std::string temporary_;
  int descriptor_ = -1;
};

}  // namespace kda::cases
