"""The C modules that Triton 3.6 builds at a kernel's first launch, built without a driver into $TRITON_CACHE_DIR, under Triton's own keys.

They are linked with an empty libcuda.so.1 that is made here; on a machine with a driver the loader takes the real one.
"""
import ctypes, hashlib, os, shutil, subprocess, sysconfig, tempfile
from pathlib import Path

NAMES = """cuGetErrorString cuFuncSetAttribute cuPointerGetAttribute cuCtxGetCurrent cuDeviceGet cuDevicePrimaryCtxRetain
cuCtxSetCurrent cuDeviceGetAttribute cuModuleLoadData cuModuleGetFunction cuFuncGetAttribute cuFuncSetCacheConfig cuCtxSetLimit
cuCtxPushCurrent cuCtxPopCurrent cuCtxGetLimit cuDeviceGetCount cuInit cuMemcpy cuLaunchKernelEx cuOccupancyMaxActiveClusters
cuTensorMapEncodeTiled cuTensorMapEncodeIm2col cuLaunchCooperativeKernel cuLaunchKernel""".split()
SOURCES = []


def prepare():
    """-> build(kernel), for each compiled kernel."""
    import triton.backends.nvidia.driver as driver
    from triton.runtime import build

    folder = tempfile.mkdtemp()
    source = Path(folder, "stub.c")
    source.write_text("".join(f"int {name}(void) {{ return 999; }}\n" for name in NAMES))
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", f"{folder}/libcuda.so.1", str(source)], check=True)
    os.environ["TRITON_LIBCUDA_PATH"] = folder
    ctypes.CDLL(f"{folder}/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)  # so that a module that is built loads
    load = build.compile_module_from_src

    def both(src, name, **more):
        module = load(src=src, name=name, **more)
        keep(src, name)
        return module

    def keep(src, name):  # where the command `file` is missing, Python's platform.architecture() knows no "ELF": another key
        from triton.runtime.cache import get_cache_manager

        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        path = get_cache_manager(hashlib.sha256((src + build.platform_key()).encode()).hexdigest()).get_file(name + suffix)
        for other in ("x86_64,Linux,64bit,ELF", "x86_64,Linux,64bit,"):
            manager = get_cache_manager(hashlib.sha256((src + other).encode()).hexdigest())
            if manager.get_file(name + suffix) is None:
                manager.put(Path(path).read_bytes(), name + suffix, binary=True)

    driver.compile_module_from_src = both
    for cached in (driver.library_dirs, driver.libcuda_dirs):
        cached.cache_clear()
    driver.CudaUtils()
    return lambda kernel: driver.CudaLauncher(kernel.src, kernel.metadata)
