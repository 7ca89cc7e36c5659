// The three copy engines: the SMs on host memory, the copy engines on merged runs, and both by way of a buffer on the GPU.
#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "driver.h"
#include "error.h"
#include "include/copy.h"
#include "runs.h"
#include "staging.h"

namespace hic::cuda {
namespace {

constexpr size_t BATCH_COPIES = 4096;               // of one cuMemcpyBatchAsync: some drivers fail far above
constexpr uint64_t STAGING_BYTES = 32u << 20;       // or one page, where that is more
constexpr uint32_t BLOCK_THREADS = 1024;
constexpr uint32_t DEFAULT_BLOCKS = 2;              // 128 KiB in flight, what a PCIe 5 link needs, and few SMs

uint32_t lanes_for(const hic_plan& plan) {
  const uint32_t units = plan.run_bytes / plan.unit_bytes;
  for (uint32_t lanes = 8; lanes < 32; lanes *= 2)
    if (units <= lanes * HIC_UNROLL) return lanes;
  return 32;
}

template <int PAGES>
int launch_inline(hic_cuda_stream* stream, Handle function, const hic_plan& part, uint32_t blocks, uint32_t lanes) {
  hic_cuda* device = stream->device;
  const std::unique_ptr<hic_inline_plan<PAGES>> inlined(new (std::nothrow) hic_inline_plan<PAGES>);
  if (!inlined) return fail(HIC_SYSTEM, "no memory for the parameters of a kernel");
  const hic_tables tables = hic_tables_of(part);
  inlined->plan = part;
  std::copy_n(tables.pieces, part.piece_count, inlined->pieces);
  std::copy_n(tables.source_pages, part.page_count, inlined->source_pages);
  std::copy_n(tables.target_pages, part.page_count, inlined->target_pages);
  const uint32_t workers_a_block = BLOCK_THREADS / lanes;
  const uint32_t grid = std::min(blocks, (part.runs * hic_chunks_a_run(part) + workers_a_block - 1) / workers_a_block);
  void* arguments[] = {inlined.get(), &lanes};
  const Result result =
      device->api.cuLaunchKernel(function, grid, 1, 1, BLOCK_THREADS, 1, 1, 0, stream->handle, arguments, nullptr);
  if (result != SUCCESS) return failed(device, "cuLaunchKernel", result);
  ++device->launches;
  return HIC_OK;
}

// As many launches as the parameters' size asks for.
int by_kernel(hic_cuda_stream* stream, const hic_plan& plan, const hic_cuda_how& how) {
  hic_cuda* device = stream->device;
  if (device->few == nullptr) return fail(HIC_INVALID, "no copy kernel has been loaded");
  if (device->address_same.load() == 0)
    return fail(HIC_INVALID, "host memory has other addresses on this GPU: only the engine direct works");
  const uint32_t lanes = how.lanes != 0 ? how.lanes : lanes_for(plan);
  const uint32_t blocks = how.blocks != 0 ? how.blocks : DEFAULT_BLOCKS;
  if (lanes > BLOCK_THREADS || BLOCK_THREADS % lanes != 0) return fail(HIC_INVALID, "%u lanes in a block of %u", lanes, BLOCK_THREADS);
  for (uint32_t piece = 0; piece < plan.piece_count; piece += HIC_INLINE_PIECES) {
    const uint32_t pieces = std::min<uint32_t>(HIC_INLINE_PIECES, plan.piece_count - piece);
    uint32_t pages = 0;
    for (uint32_t page = 0; page < plan.page_count; page += pages) {
      pages = std::min<uint32_t>(HIC_MANY_PAGES, plan.page_count - page);
      const hic_plan part = part_of(plan, page, pages, piece, pieces);
      const int code = pages <= HIC_FEW_PAGES
                           ? launch_inline<HIC_FEW_PAGES>(stream, device->few, part, blocks, lanes)
                           : launch_inline<HIC_MANY_PAGES>(stream, device->many, part, blocks, lanes);
      if (code != HIC_OK) return code;
    }
  }
  return HIC_OK;
}

// Runs cut where one registration of host memory ends and the next begins: no copy may cross that.
void cut_at_borders(hic_cuda* device, bool to_host, std::vector<hic_run>* runs) {
  std::map<uint64_t, uint64_t> registered;
  {
    const std::lock_guard<std::mutex> hold(device->mutex);
    if (device->registered.size() < 2) return;
    registered = device->registered;
  }
  std::vector<hic_run> cut;
  cut.reserve(runs->size());
  for (hic_run run : *runs) {
    for (;;) {
      const uint64_t host = to_host ? run.target : run.source;
      auto next = registered.upper_bound(host);  // the registration after the one that holds `host`
      const uint64_t border = next == registered.end() ? UINT64_MAX : next->first;
      if (host + run.bytes <= border) break;
      const uint64_t head = border - host;
      cut.push_back({run.source, run.target, head});
      run.source += head;
      run.target += head;
      run.bytes -= head;
    }
    cut.push_back(run);
  }
  runs->swap(cut);
}

// One call of the driver for up to BATCH_COPIES copies.
Result batch(hic_cuda_stream* stream, const hic_run* runs, size_t count) {
  hic_cuda* device = stream->device;
  std::vector<Address> targets(count), sources(count);
  std::vector<size_t> sizes(count);
  for (size_t i = 0; i < count; ++i) {
    targets[i] = runs[i].target;
    sources[i] = runs[i].source;
    sizes[i] = runs[i].bytes;
  }
  // The source of a load that waits for nothing lies still, and may be read before the stream gets there.  A write-back's may not:
  // in any other order but the stream's it would be read before the forward pass that it waits for has written it.
  CopyAttributes attributes = {};
  attributes.source_order = stream->sources_lie_still ? SOURCE_IN_ANY_ORDER : SOURCE_IN_STREAM_ORDER;
  size_t first = 0, failed_at = 0;
  ++device->batch_calls;
  if (device->api.batch_13000 != nullptr)
    return device->api.batch_13000(targets.data(), sources.data(), sizes.data(), count, &attributes, &first, 1, stream->handle);
  return device->api.batch_12080(targets.data(), sources.data(), sizes.data(), count, &attributes, &first, 1, &failed_at,
                                 stream->handle);
}

int by_runs(hic_cuda_stream* stream, std::vector<hic_run> runs, bool to_host) {
  hic_cuda* device = stream->device;
  cut_at_borders(device, to_host, &runs);
  const bool has_batch = device->api.batch_13000 != nullptr || device->api.batch_12080 != nullptr;
  size_t done = 0;
  while (has_batch && device->batch_works.load() != 0 && done < runs.size() && runs.size() > 1) {
    const size_t count = std::min(BATCH_COPIES, runs.size() - done);
    const Result result = batch(stream, runs.data() + done, count);
    if (result == INVALID_VALUE || result == NOT_SUPPORTED) {
      device->batch_works.store(0);  // one by one from here on; what of it was taken is copied twice, in order
      break;
    }
    if (result != SUCCESS) return failed(device, "cuMemcpyBatchAsync", result);
    done += count;
  }
  for (; done < runs.size(); ++done) {
    const Result result = device->api.cuMemcpyAsync(runs[done].target, runs[done].source, runs[done].bytes, stream->handle);
    if (result != SUCCESS) return failed(device, "cuMemcpyAsync", result);
    ++device->single_calls;
  }
  return HIC_OK;
}

int room_for(hic_cuda_stream* stream, uint64_t page_bytes) {
  hic_cuda* device = stream->device;
  const uint64_t wanted = std::max(STAGING_BYTES, page_bytes);
  if (stream->staging_bytes >= wanted) return HIC_OK;
  Address fresh = 0;
  Result result = device->api.cuMemAlloc_v2(&fresh, wanted);
  if (result != SUCCESS) return failed(device, "cuMemAlloc", result);
  if (stream->staging != 0) {  // freeing waits for what still uses it
    result = device->api.cuMemFree_v2(stream->staging);
    if (result != SUCCESS) return failed(device, "cuMemFree", result);
  }
  stream->staging = fresh;
  stream->staging_bytes = wanted;
  return HIC_OK;
}

int by_staging(hic_cuda_stream* stream, const hic_plan& plan, const hic_cuda_how& how) {
  if (how.to_host == 0) return fail(HIC_INVALID, "the engine staged goes from the GPU to the host only");
  PageSpan page;
  int code = page_span(plan, &page);
  if (code != HIC_OK) return code;
  code = room_for(stream, page.bytes);
  if (code != HIC_OK) return code;
  const Staging staging(plan, page, stream->staging, stream->staging_bytes);
  for (uint32_t first = 0; first < plan.page_count; first += staging.room()) {
    const uint32_t pages = std::min(staging.room(), plan.page_count - first);
    code = by_kernel(stream, staging.gather(first, pages), how);
    if (code != HIC_OK) return code;
    code = by_runs(stream, staging.deliver(first, pages), true);  // the next gather waits for them: one stream, one order
    if (code != HIC_OK) return code;
  }
  return HIC_OK;
}

}  // namespace

int copy(hic_cuda_stream* stream, const hic_plan& plan, const hic_cuda_how& how) {
  if (plan.runs == 0) return HIC_OK;
  if (how.to_host != 0) stream->sources_lie_still = false;
  try {
    switch (how.engine) {
      case HIC_ENGINE_KERNEL:
        return by_kernel(stream, plan, how);
      case HIC_ENGINE_DIRECT:
        return by_runs(stream, merged_runs(plan, how.to_host != 0), how.to_host != 0);
      case HIC_ENGINE_STAGED:
        return by_staging(stream, plan, how);
      default:
        return fail(HIC_INVALID, "engine %d", how.engine);
    }
  } catch (const std::bad_alloc&) {
    return fail(HIC_SYSTEM, "no memory for a copy of %u runs", plan.runs);
  }
}

}  // namespace hic::cuda
