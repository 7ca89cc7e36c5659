// Which instruction sets may be chosen at run time, where the machine has them.
#pragma once

// 0: none but what the compiler was told; 1: x86's of 2013 (AVX2, SHA); 2: AVX-512 as well.  Tests build the lower ones.
#ifndef HIC_ISA
#define HIC_ISA 2
#endif

#if !defined(__x86_64__)
#undef HIC_ISA
#define HIC_ISA 0
#endif
