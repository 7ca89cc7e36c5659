"""The native library: one plain C ABI (capi.h), built by g++ at install time, optional, loaded by ctypes.

``src/`` is C++, ``capi/`` what of it can be called, ``include/`` what GPU compilers read too; the modules here are thin typed
bindings, one for each part.  `native.library.library()` is the way in.
"""
