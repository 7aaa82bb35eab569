#include "support.h"

#include "engine.h"

#include <algorithm>

namespace ebb::shard {
namespace {

using test::make_chain;
using test::make_subject;
using test::shard_subject;
using ::testing::HasSubstr;

TEST(Explain, NamesUnitsFramesAndWarnsOfOneUnitThatHoldsNearlyEverything) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto chain = make_chain(3);
    auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .wrap = wrap_root()});
    EXPECT_THAT(
        model.explain(), ::testing::AllOf(
                             HasSubstr("full_shard over 2 rank(s): 216 parameters in 1 unit(s)"),
                             HasSubstr("warning: unit '(root)' holds 100%")));
    auto split = make_chain(3);
    auto sharded = fully_shard(split, {.mesh = comm::Mesh(group), .wrap = wrap_by_class({"Linear"})});
    EXPECT_THAT(sharded.explain(), ::testing::AllOf(HasSubstr("in 3 unit(s)"), ::testing::Not(HasSubstr("warning"))));
  });
}

TEST(Explain, ShowsEveryPartOfTheExpectedPeak) {
  const auto peak_of = [](Strategy strategy) {
    auto chain = make_chain(3);
    const auto model =
        fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .strategy = strategy, .wrap = wrap_by_size(1)});
    const auto text = model.explain();
    return text.substr(text.find("expected peak"));
  };
  // Three units of 72 elements, padded to 80; shards, gradients and AdamW state, three frames, two reduce buffers.
  EXPECT_THAT(
      peak_of(Strategy::kFullShard),
      HasSubstr("5440 B = shards 960 B + gradients 960 B + AdamW state 1920 B + frames 960 B + reduce buffers 640 B"));
  EXPECT_THAT(
      peak_of(Strategy::kShardGradOp),
      HasSubstr("6400 B = shards 960 B + gradients 960 B + AdamW state 1920 B + frames "
                "960 B + kept units 960 B + reduce buffers 640 B"));
  EXPECT_THAT(peak_of(Strategy::kNoShard), HasSubstr("4480 B = shards 960 B"));
}

/// A second passes at each look.
class TickingClock final : public ScriptedClock {
 public:
  TimePoint now() const override {
    return ScriptedClock::now() + std::chrono::seconds(looks_++);
  }

 private:
  mutable int looks_ = 0;
};

TEST(Explain, TellsAfterAStepWhatWasMeasured) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto chain = make_chain(4);
    auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1)});
    EXPECT_THAT(model.explain(), ::testing::Not(HasSubstr("measured")));
    chain->forward(at::ones({2, 8})).sum().backward();
    EXPECT_THAT(
        model.explain(),
        ::testing::AllOf(
            HasSubstr("measured: "), HasSubstr("4 reductions"), HasSubstr("1152 B at the peak, 1152 B is the allowance"),
            HasSubstr("communication: under way for")));

    const TickingClock clock;
    model.engine().use_clock(clock);
    model.reset_stats();
    model.unshard({"0"}).wait(); // looks as it starts, before the wait and after it
    EXPECT_EQ(model.stats().comm_seconds, 2);
    EXPECT_EQ(model.stats().wait_seconds, 1);
    EXPECT_THAT(model.explain(), HasSubstr("under way for 2 s, of which this rank waited 1 s; 50 % was hidden"));
    model.reset_stats();
    EXPECT_EQ(model.stats().comm_seconds, 0);
    model.engine().use_clock(Clock::real());
  });
}

TEST(WrapPolicy, ChoosesUnitsByClassSizeNamePredicateAndNested) {
  const auto units = [](WrapPolicy policy) {
    auto subject = make_subject("gpt");
    auto model = shard_subject(subject, {.mesh = comm::Mesh(comm::single()), .wrap = std::move(policy)});
    const auto text = model.explain();
    return std::count(text.begin(), text.end(), '\n') - 4; // head, titles, frames, peak
  };
  EXPECT_EQ(units(wrap_root()), 1);
  EXPECT_EQ(units(wrap_by_class({"Block"})), 4);
  EXPECT_EQ(units(wrap_by_type<test::BlockImpl>()), 4);
  EXPECT_EQ(units(wrap_by_name({"blocks.0", "blocks.2"})), 3);
  EXPECT_EQ(units(wrap_by_size(3000)), 4);
  EXPECT_EQ(units([](const ModuleInfo& info) { return info.depth == 2; }), 4);
  EXPECT_EQ(units(wrap_any({wrap_by_class({"Block"}), wrap_by_name({"blocks.1.qkv"})})), 5);
}

TEST(WrapPolicy, ByNameRefusesANameThatTheModelLacksAlsoInsideWrapAny) {
  for (const bool nested : {false, true}) {
    auto chain = make_chain(2);
    auto policy = wrap_by_name({"0", "7"});
    if (nested) {
      policy = wrap_any({wrap_by_class({"Linear"}), policy});
    }
    EXPECT_THAT(
        test::error_of([&] { (void)fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .wrap = policy}); }),
        ::testing::AllOf(HasSubstr("got '7'"), HasSubstr("names of modules")));
  }
}

} // namespace
} // namespace ebb::shard
