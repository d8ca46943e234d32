// Errors as values: `Status` for calls without a result, `Result<T>` for calls with one.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace kda {

/// Kinds of failure. Values are part of the C ABI.
enum class StatusCode : int32_t {
  kOk = 0,
  kInvalidArgument = 1,  ///< No implementation could do this: the call itself is wrong.
  kUnsupported = 2,      ///< This implementation or machine cannot; the message names the feature.
  kDeviceError = 3,      ///< The device or its driver failed.
  kOutOfMemory = 4,      ///< Memory that the call needs could not be had.
  kInternal = 5,         ///< A defect of this library.
};

/// "ok", "invalid argument", "unsupported", "device error", "out of memory", "internal error".
const char* name_of(StatusCode code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  /// One line for people: the argument, what was found, what was expected, what to do.
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

/// Thrown only by Result<T>::value() on a failure.
class Error : public std::runtime_error {
 public:
  explicit Error(const Status& status) : std::runtime_error(status.message()), status_(status) {}
  const Status& status() const { return status_; }

 private:
  Status status_;
};

/// A value or the reason why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }

  /// The value; throws kda::Error if there is none.
  T& value() & {
    require();
    return *value_;
  }
  const T& value() const& {
    require();
    return *value_;
  }
  T&& value() && {
    require();
    return std::move(*value_);
  }

  /// The value, unchecked: only after ok().
  T& operator*() { return *value_; }
  const T& operator*() const { return *value_; }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  void require() const {
    if (!value_) throw Error(status_);
  }

  std::optional<T> value_;
  Status status_;
};

}  // namespace kda
