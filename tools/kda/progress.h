// Shows on a terminal what takes long.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace kda::program {

/// After a second of work a line on stderr says how far it is, and vanishes at the end. Does
/// nothing when stderr is no terminal.
class Progress {
 public:
  explicit Progress(std::string label);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress();

  /// "3/20 name"
  void step(const std::string& what);

 private:
  void show();

  std::string label_;
  std::string what_;
  bool done_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::thread thread_;
};

}  // namespace kda::program
