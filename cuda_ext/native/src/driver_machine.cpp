// What the GPU is told and asked before copies run: its facts, its kernel, and the host memory that it may reach.
#include "driver.h"
#include "error.h"

using hic::fail;
using hic::cuda::Entered;
using hic::cuda::Handle;
using hic::cuda::Result;
using hic::cuda::SUCCESS;

int hic_cuda_facts_of(hic_cuda* device, hic_cuda_facts* facts) {
  *facts = {};
  HIC_TRY(device, cuDeviceGetName, (facts->name, sizeof facts->name, device->id));
  HIC_TRY(device, cuDeviceGetPCIBusId, (facts->pci, sizeof facts->pci, device->id));
  HIC_TRY(device, cuDeviceGetAttribute, (&facts->multiprocessors, hic::cuda::ATTRIBUTE_MULTIPROCESSORS, device->id));
  HIC_TRY(device, cuDeviceGetAttribute, (&facts->major, hic::cuda::ATTRIBUTE_MAJOR, device->id));
  HIC_TRY(device, cuDeviceGetAttribute, (&facts->minor, hic::cuda::ATTRIBUTE_MINOR, device->id));
  const bool batch = device->batch_works.load() != 0;
  facts->ordinal = device->ordinal;
  facts->driver_version = device->api.driver_version;
  facts->batch_version = !batch ? 0 : device->api.batch_13000 ? 13000 : device->api.batch_12080 ? 12080 : 0;
  facts->has_kernel = device->few != nullptr && device->many != nullptr;
  facts->host_address_same = device->address_same.load();
  facts->registered_bytes = device->registered_bytes.load();
  facts->batch_calls = device->batch_calls.load();
  facts->single_calls = device->single_calls.load();
  facts->launches = device->launches.load();
  return HIC_OK;
}

int hic_cuda_load_kernel(hic_cuda* device, const void* image) {
  const Entered entered(device);
  if (entered.code != HIC_OK) return entered.code;
  Handle module = nullptr;
  HIC_TRY(device, cuModuleLoadData, (&module, image));
  const auto find = [&]() -> int {
    HIC_TRY(device, cuModuleGetFunction, (&device->few, module, "hic_copy_few"));
    HIC_TRY(device, cuModuleGetFunction, (&device->many, module, "hic_copy_many"));
    return HIC_OK;
  };
  const int code = find();
  if (code != HIC_OK) {
    device->few = device->many = nullptr;
    device->api.cuModuleUnload(module);
    return code;
  }
  device->module = module;
  return HIC_OK;
}

int hic_cuda_register(hic_cuda* device, uint64_t address, uint64_t bytes) {
  const Entered entered(device);
  if (entered.code != HIC_OK) return entered.code;
  void* begin = reinterpret_cast<void*>(address);
  HIC_TRY(device, cuMemHostRegister_v2, (begin, bytes, hic::cuda::REGISTER_PORTABLE_MAPPED));
  hic::cuda::Address there = 0;
  const Result result = device->api.cuMemHostGetDevicePointer_v2(&there, begin, 0);
  if (result != SUCCESS) {
    device->api.cuMemHostUnregister(begin);
    return hic::cuda::failed(device, "cuMemHostGetDevicePointer", result);
  }
  if (there != address) device->address_same.store(0);
  const std::lock_guard<std::mutex> hold(device->mutex);
  device->registered[address] = address + bytes;
  device->registered_bytes += bytes;
  return HIC_OK;
}

int hic_cuda_unregister(hic_cuda* device, uint64_t address) {
  const Entered entered(device);
  if (entered.code != HIC_OK) return entered.code;
  {
    const std::lock_guard<std::mutex> hold(device->mutex);
    const auto found = device->registered.find(address);
    if (found == device->registered.end()) return fail(HIC_INVALID, "nothing is registered at this address");
    device->registered_bytes -= found->second - found->first;
    device->registered.erase(found);
  }
  HIC_TRY(device, cuMemHostUnregister, (reinterpret_cast<void*>(address)));
  return HIC_OK;
}

