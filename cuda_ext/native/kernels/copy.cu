// What nvcc compiles into the fatbin of a wheel.  NVRTC compiles the header alone.
#include "copy.h"
