// Verdicts on drivers, devices and addresses that this machine need not have.
#include <gtest/gtest.h>

#include "cuda/device_check.h"
#include "cuda/launch.h"

namespace kda::cuda {
namespace {

Status verdict(int major, int minor, cudaError_t code, int index = 1) {
  DeviceFacts facts;
  facts.device = {DeviceType::kCuda, index};
  facts.devices = 2;
  facts.major = major;
  facts.minor = minor;
  facts.code = code;
  return check_device_facts(facts);
}

bool says(const Status& status, std::string_view words) {
  return status.message().find(words) != std::string::npos;
}

TEST(DriverCheck, SaysWhatIsMissing) {
  EXPECT_EQ(driver_problem({cudaSuccess, 1, 13000}), "");
  EXPECT_EQ(driver_problem({cudaErrorInsufficientDriver, 0, 0}), "no CUDA driver is installed");
  EXPECT_EQ(driver_problem({cudaErrorNoDevice, 0, 13000}), "no CUDA device is visible");
  EXPECT_EQ(driver_problem({cudaSuccess, 0, 13000}), "no CUDA device is visible");
  const std::string old = driver_problem({cudaErrorInsufficientDriver, 0, 11040});
  EXPECT_NE(old.find("the CUDA driver supports CUDA 11.4, this build needs "), std::string::npos);
  EXPECT_NE(old.find("update the driver"), std::string::npos);
  EXPECT_NE(driver_problem({cudaErrorSystemDriverMismatch, 0, 12000})
                .find("cudaErrorSystemDriverMismatch"),
            std::string::npos);
}

// As in the child of a fork, where the number of devices is known and nothing else is.
TEST(DeviceCheck, ADeviceThatDoesNotAnswerIsNoOldGpu) {
  DeviceFacts facts;
  facts.devices = 1;
  facts.asked = cudaErrorInitializationError;
  const Status status = check_device_facts(facts);
  EXPECT_EQ(status.code(), StatusCode::kDeviceError);
  EXPECT_TRUE(says(status, "compute capability of cuda:0: ")) << status.message();
  EXPECT_TRUE(says(status, "child of a fork")) << status.message();
}

TEST(DeviceCheck, AnOldGpuOrOneWithoutCodeIsUnsupported) {
  EXPECT_TRUE(verdict(8, 0, cudaSuccess).ok());
  EXPECT_TRUE(verdict(12, 1, cudaSuccess).ok());
  const Status old = verdict(7, 5, cudaSuccess);
  EXPECT_EQ(old.code(), StatusCode::kUnsupported);
  EXPECT_TRUE(says(old, "cuda:1 has compute capability 7.5, 8.0 or more is needed"))
      << old.message();
  for (const cudaError_t error :
       {cudaErrorNoKernelImageForDevice, cudaErrorInvalidDeviceFunction}) {
    const Status no_code = verdict(9, 0, error);
    EXPECT_EQ(no_code.code(), StatusCode::kUnsupported);
    EXPECT_TRUE(says(no_code, "no code for compute capability 9.0")) << no_code.message();
  }
}

TEST(DeviceCheck, PtxThatTheDriverCannotCompileNamesTheWayOut) {
  const Status status = verdict(12, 1, cudaErrorUnsupportedPtxVersion);
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_TRUE(says(status, "update the driver, or rebuild with 121-real")) << status.message();
}

TEST(DeviceCheck, AFullDeviceIsOutOfMemoryAndAMissingOneAnArgument) {
  const Status full = verdict(9, 0, cudaErrorMemoryAllocation);
  EXPECT_EQ(full.code(), StatusCode::kOutOfMemory);
  EXPECT_TRUE(says(full, "device cuda:1")) << full.message();
  EXPECT_EQ(verdict(9, 0, cudaErrorDevicesUnavailable).code(), StatusCode::kDeviceError);
  const Status missing = verdict(9, 0, cudaSuccess, 2);
  EXPECT_EQ(missing.code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(says(missing, "device index: found 2, expected 0..1")) << missing.message();
}

TEST(AddressCheck, NamesTheTensorAndWhereItIs) {
  const Device device{DeviceType::kCuda, 1};
  int there = 0;
  AddressFacts facts;
  facts.attributes.type = cudaMemoryTypeDevice;
  facts.attributes.device = 1;
  EXPECT_TRUE(check_address_facts("q", &there, facts, device).ok());

  facts.attributes.device = 0;  // DEV-01: tensors on two devices
  const Status elsewhere = check_address_facts("q", &there, facts, device);
  EXPECT_EQ(elsewhere.code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(says(elsewhere, "q: its memory is on cuda:0, expected the plan's device cuda:1"));

  facts.attributes.type = cudaMemoryTypeUnregistered;
  const Status host = check_address_facts("k", &there, facts, device);
  EXPECT_EQ(host.code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(says(host, "k: address ")) << host.message();
  EXPECT_TRUE(says(host, "CUDA does not know (host memory, or freed), expected memory of cuda:1"))
      << host.message();
  facts.pageable = true;
  EXPECT_TRUE(check_address_facts("k", &there, facts, device).ok());
  for (const cudaMemoryType type : {cudaMemoryTypeHost, cudaMemoryTypeManaged}) {
    facts.attributes.type = type;
    EXPECT_TRUE(check_address_facts("k", &there, facts, device).ok());
  }

  facts.error = cudaErrorIllegalAddress;
  EXPECT_EQ(check_address_facts("v", &there, facts, device).code(), StatusCode::kDeviceError);
}

// An error that later calls do not share is no reason to restart.
TEST(DeviceError, SaysWhetherTheContextIsLost) {
  for (const cudaError_t error : {cudaErrorIllegalAddress, cudaErrorLaunchFailure,
                                  cudaErrorMisalignedAddress, cudaErrorAssert}) {
    const Status status = device_error("kernel", error);
    EXPECT_EQ(status.code(), StatusCode::kDeviceError);
    EXPECT_TRUE(says(status, cudaGetErrorName(error))) << status.message();
    EXPECT_TRUE(says(status, "restart the process")) << status.message();
  }
  for (const cudaError_t error : {cudaErrorInvalidConfiguration, cudaErrorMemoryAllocation}) {
    EXPECT_FALSE(says(device_error("kernel", error), "restart the process"));
  }
}

}  // namespace
}  // namespace kda::cuda
