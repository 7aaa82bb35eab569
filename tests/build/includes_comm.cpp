// Compiled by the tests Build.ArrowByInclude.*, never linked.
#include "ebb/comm/work.h"
