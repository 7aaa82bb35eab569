# Finds LibTorch without its own TorchConfig.cmake, which insists on a CUDA toolchain.
#
# Input, first match wins:
#   TORCH_ROOT          folder that holds include/ and lib/ (an unpacked wheel's torch/, or an installed libtorch)
#   LibTorch_PYTHON     a Python interpreter that has the torch wheel installed
# Components: cuda      also find torch_cuda, c10_cuda, the CUDA runtime and NCCL of the wheel's nvidia/ folder
#
# Targets: LibTorch::c10, LibTorch::torch_cpu, LibTorch::torch (what programs link) and, with cuda,
#          LibTorch::torch_cuda, LibTorch::nccl.
include(FindPackageHandleStandardArgs)

set(TORCH_ROOT "$CACHE{TORCH_ROOT}" CACHE PATH "Folder of LibTorch that holds include/ and lib/")
set(_lt_root "${TORCH_ROOT}")
if(NOT _lt_root AND LibTorch_PYTHON)
  # find_spec does not import torch: the CPU-only set of wheels lacks what `import torch` needs.
  execute_process(
    COMMAND "${LibTorch_PYTHON}" -c
      "import importlib.util as u; s=u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE _lt_root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()

set(LibTorch_VERSION "")
if(EXISTS "${_lt_root}/version.py")
  file(STRINGS "${_lt_root}/version.py" _lt_line REGEX "^__version__ *=")
  string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" LibTorch_VERSION "${_lt_line}")
elseif(EXISTS "${_lt_root}/build-version")
  file(STRINGS "${_lt_root}/build-version" _lt_line LIMIT_COUNT 1)
  string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" LibTorch_VERSION "${_lt_line}")
endif()

# Plain variables: a cached library would outlive a change of TORCH_ROOT.
foreach(_lt_lib c10 torch_cpu c10_cuda torch_cuda)
  unset(_lt_${_lt_lib})
  find_library(_lt_${_lt_lib} NAMES ${_lt_lib} PATHS "${_lt_root}/lib" NO_DEFAULT_PATH NO_CACHE)
endforeach()
set(LibTorch_INCLUDE_DIR "${_lt_root}/include")
set(LibTorch_LIBRARY_DIR "${_lt_root}/lib")
set(_lt_nvidia "${_lt_root}/../nvidia")

set(_lt_required _lt_c10 _lt_torch_cpu)
set(LibTorch_cuda_FOUND FALSE)
if("cuda" IN_LIST LibTorch_FIND_COMPONENTS)
  # The wheels ship only the versioned sonames, so find_library cannot see them.
  file(GLOB _lt_cudart "${_lt_nvidia}/cu*/lib/libcudart.so.*")
  file(GLOB _lt_nccl "${_lt_nvidia}/nccl/lib/libnccl.so.*")
  file(GLOB _lt_cuda_include "${_lt_nvidia}/cu*/include")
  if(_lt_c10_cuda AND _lt_torch_cuda AND _lt_cudart AND _lt_nccl)
    set(LibTorch_cuda_FOUND TRUE)
  endif()
endif()

find_package_handle_standard_args(LibTorch
  REQUIRED_VARS ${_lt_required} LibTorch_INCLUDE_DIR
  VERSION_VAR LibTorch_VERSION
  HANDLE_COMPONENTS
  REASON_FAILURE_MESSAGE
    "no LibTorch at '${_lt_root}'. Run tools/setup, or pass -DTORCH_ROOT=<folder with include/ and lib/>, or -DLibTorch_PYTHON=<python that has torch>")

if(LibTorch_FOUND AND NOT TARGET LibTorch::torch)
  add_library(LibTorch::c10 SHARED IMPORTED)
  set_target_properties(LibTorch::c10 PROPERTIES
    IMPORTED_LOCATION "${_lt_c10}" INTERFACE_INCLUDE_DIRECTORIES "${LibTorch_INCLUDE_DIR}")
  target_compile_features(LibTorch::c10 INTERFACE cxx_std_20)
  # LibTorch ships the headers of its own fmt and no library for them.
  target_compile_definitions(LibTorch::c10 INTERFACE FMT_HEADER_ONLY=1)

  add_library(LibTorch::torch_cpu SHARED IMPORTED)
  set_target_properties(LibTorch::torch_cpu PROPERTIES IMPORTED_LOCATION "${_lt_torch_cpu}")
  target_include_directories(LibTorch::torch_cpu INTERFACE "${LibTorch_INCLUDE_DIR}/torch/csrc/api/include")
  target_compile_definitions(LibTorch::torch_cpu INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)
  target_link_libraries(LibTorch::torch_cpu INTERFACE LibTorch::c10)

  add_library(LibTorch::torch INTERFACE IMPORTED)
  target_link_libraries(LibTorch::torch INTERFACE LibTorch::torch_cpu LibTorch::c10)

  if(LibTorch_cuda_FOUND)
    add_library(LibTorch::nccl INTERFACE IMPORTED)
    target_include_directories(LibTorch::nccl INTERFACE "${_lt_nvidia}/nccl/include")
    target_link_libraries(LibTorch::nccl INTERFACE "${_lt_nccl}")

    add_library(LibTorch::torch_cuda INTERFACE IMPORTED)
    target_include_directories(LibTorch::torch_cuda INTERFACE ${_lt_cuda_include})
    target_compile_definitions(LibTorch::torch_cuda INTERFACE USE_CUDA USE_C10D_NCCL)
    # torch_cuda does its work by registering itself, so nothing refers to it and --as-needed would drop it.
    target_link_libraries(LibTorch::torch_cuda INTERFACE
      LibTorch::torch "${_lt_c10_cuda}" "${_lt_cudart}" LibTorch::nccl
      "-Wl,--push-state,--no-as-needed" "${_lt_torch_cuda}" "-Wl,--pop-state")
  endif()
endif()
