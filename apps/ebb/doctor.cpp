#include "doctor_checks.h"

#include "ebb/base/error.h"

#include <CLI/CLI.hpp>

#include <cstdio>
#include <memory>
