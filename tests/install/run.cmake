# cmake --install, then a consumer that finds ebb there, then its program, alone and on two ranks.
cmake_minimum_required(VERSION 3.25)

function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

file(REMOVE_RECURSE "${WORK}")
set(prefix "${WORK}/prefix")
run(${CMAKE_COMMAND} --install "${BUILD}" --prefix "${prefix}")

# A package that named a folder of the machine it was built on would work nowhere else.
file(GLOB_RECURSE packages "${prefix}/*.cmake")
if(NOT packages)
  message(FATAL_ERROR "nothing was installed that find_package(ebb) could find")
endif()
foreach(package IN LISTS packages)
  file(READ "${package}" text)
  foreach(folder "${TORCH_ROOT}" "${SOURCE}" "${BUILD}")
    string(FIND "${text}" "${folder}" at)
    if(NOT at EQUAL -1)
      message(FATAL_ERROR "${package} names ${folder}")
    endif()
  endforeach()
endforeach()

# The program that README.md shows, word for word.
file(READ "${SOURCE}/README.md" readme)
if(NOT readme MATCHES "```cpp\n(.*int main\\(\\) {.*\n}\n)```")
  message(FATAL_ERROR "README.md has no C++ program")
endif()
string(REGEX REPLACE "^.*```cpp\n" "" program "${readme}")
string(REGEX REPLACE "\n```.*$" "\n" program "${program}")
file(WRITE "${WORK}/build/main.cpp" "${program}")

run(${CMAKE_COMMAND} -S "${SOURCE}/tests/install/consumer" -B "${WORK}/build" -G "${GENERATOR}"
  -DCMAKE_CXX_COMPILER=${CXX} "-DCMAKE_PREFIX_PATH=${prefix}" "-DTORCH_ROOT=${TORCH_ROOT}")
run(${CMAKE_COMMAND} --build "${WORK}/build")

# Losses go down: the first and the last line that the program prints, over one rank.
function(check_losses output)
  string(REGEX MATCHALL "step [0-9]+: loss ([0-9.e+-]+)" lines "${output}")
  list(LENGTH lines count)
  if(NOT count EQUAL ${ARGV1})
    message(FATAL_ERROR "expected ${ARGV1} lines of losses, got ${count}:\n${output}")
  endif()
  list(GET lines 0 first)
  list(GET lines -1 last)
  string(REGEX REPLACE ".*loss " "" first "${first}")
  string(REGEX REPLACE ".*loss " "" last "${last}")
  if(NOT last LESS first)
    message(FATAL_ERROR "the loss did not fall: ${first} at first, ${last} at the end")
  endif()
endfunction()

execute_process(COMMAND "${WORK}/build/consumer" OUTPUT_VARIABLE alone TIMEOUT 60 COMMAND_ERROR_IS_FATAL ANY)
check_losses("${alone}" 3)
message(STATUS "one rank:\n${alone}")

# Two ranks, told their places as torchrun does; a pipeline runs both at once, and shows the output of the last.
string(RANDOM LENGTH 4 ALPHABET "0123456789" digits)
set(rank ${CMAKE_COMMAND} -E env WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=2${digits})
execute_process(
  COMMAND ${rank} RANK=0 LOCAL_RANK=0 "${WORK}/build/consumer"
  COMMAND ${rank} RANK=1 LOCAL_RANK=1 "${WORK}/build/consumer"
  OUTPUT_VARIABLE together TIMEOUT 60 COMMAND_ERROR_IS_FATAL ANY)
check_losses("${together}" 3)
message(STATUS "rank 1 of two:\n${together}")

# The installed program finds LibTorch by itself.
run("${prefix}/bin/ebb" --version)
