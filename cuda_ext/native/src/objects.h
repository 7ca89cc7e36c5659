// The header of a stored object: written, and judged.  backends/objects.py has the table, and says what the verdicts mean.
#pragma once

#include "capi/digest.h"

namespace hic {

constexpr uint64_t kHeaderBytes = 4096;

// `at`: which object of the batch it is.
void seal(uint8_t* object, uint64_t bytes, const hic_names& names, uint64_t at);
// -> a hic_verdict.
uint8_t judge(const uint8_t* object, uint64_t bytes, const hic_names& names, uint64_t at);

}  // namespace hic
