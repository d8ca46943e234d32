// A file that appears whole or not at all.
#pragma once

#include <cstddef>
#include <string>

#include "kda/status.h"

namespace kda::cases {

/// Writes to a file without a name in the directory of `path`, and names it on commit. Whatever
/// ends the process before, SIGKILL included, leaves nothing. Where the file system knows no such
/// files the file has a temporary name, which is removed unless the process is killed.
class AtomicFile {
 public:
  AtomicFile() = default;
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile();

  /// A link at `path` stays, its target (there or not) is written. A file at `path` gives the new
  /// one its mode.
  Status open(const std::string& path);
  Status write(const void* data, std::size_t bytes);
  /// Flushes to the disk and puts the file at its place.
  Status commit();

 private:
  Status fail(const char* what, int error);
  bool open_unnamed(int mode);
  bool open_named(int mode);
  bool name_it();
  void discard();

  std::string path_;
  std::string directory_;
  std::string temporary_;  ///< empty while the file has no name
  int descriptor_ = -1;
};

/// Makes SIGHUP, SIGINT and SIGTERM, and exit() by whoever calls it, remove a temporary file that
/// has a name; the signal then ends the process as it would have.
void remove_temporary_file_at_exit();

}  // namespace kda::cases
