#include "subcommand.h"

namespace ebb::app {

const std::vector<Subcommand>& subcommands() {
  static const std::vector<Subcommand> all = {
      {"train", "Train a language model on text files, sharded over ranks", declare_train},
      {"doctor", "Say what this machine offers and what it lacks", declare_doctor},
  };
  return all;
}

} // namespace ebb::app
