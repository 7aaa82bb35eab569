#include "operation_header.h"

#include "ordered_sum.h"

#include <cmath>
#include <numeric>

namespace ebb::comm {
namespace {

constexpr std::size_t kMaxExchangeBytes = 1 << 20;

void check_tensor(const at::Tensor& tensor, const char* what, Op op, c10::DeviceType device, std::string_view unit) {
  TORCH_CHECK_VALUE(
      tensor.defined() && tensor.device().type() == device && tensor.is_contiguous(), "[", name_of(op), "] unit '",
      unit, "': the ", what, " must be a contiguous tensor on ", device, ", got ",
      !tensor.defined() ? std::string("an undefined tensor")
                        : c10::str(tensor.is_contiguous() ? "" : "a non-contiguous one on ", tensor.device()),
      "; pass tensor.contiguous() on that device");
}

void check_divisor(const at::Tensor& tensor, double divisor, Op op, std::string_view unit) {
  TORCH_CHECK_VALUE(
      can_combine(tensor.scalar_type()), "[", name_of(op), "] unit '", unit,
      "': expected float, double, bfloat16, half, int or long, got ", tensor.scalar_type(),
      "; convert the tensor first");
  TORCH_CHECK_VALUE(
      std::isfinite(divisor) && divisor != 0 && (divisor == 1 || tensor.is_floating_point()), "[", name_of(op),
      "] unit '", unit, "': expected a finite divisor other than 0 (1 for integers), got ", divisor, " for ",
      tensor.scalar_type());
}

} // namespace

std::string_view name_of(Op op) {
  switch (op) {
    case Op::kAllGather:
      return "all_gather";
    case Op::kReduceScatter:
      return "reduce_scatter";
    case Op::kAllReduce:
      return "all_reduce";
    case Op::kBroadcast:
      return "broadcast";
    case Op::kBarrier:
      return "barrier";
    case Op::kExchange:
      return "exchange";
  }
  return "unknown";
}

std::int64_t Traffic::total_bytes_sent() const {
  return std::accumulate(bytes_sent.begin(), bytes_sent.end(), std::int64_t{0});
}

std::int64_t Traffic::total_bytes_across_hosts() const {
  return std::accumulate(bytes_across_hosts.begin(), bytes_across_hosts.end(), std::int64_t{0});
}

std::shared_ptr<Communicator> Communicator::split(const std::vector<int>& /*ranks*/, const std::string& name) {
  C10_THROW_ERROR(
      NotImplementedError,
      c10::str(
          "[Mesh] backend ", capabilities().backend, " cannot split off the group ", name, "; use a mesh of one axis"));
}

std::string describe(const Operation& operation) {
  std::string text(name_of(operation.op));
  if (!operation.unit.empty()) {
    text += " of unit '" + operation.unit + "'";
  }
  return text + " at step " + std::to_string(operation.step);
}

std::pair<std::int64_t, std::int64_t> all_reduce_chunk(std::int64_t count, int r, int size) {
  return {count * r / size, count * (r + 1) / size};
}

std::int64_t all_reduce_bytes(std::int64_t count, std::int64_t element_bytes, int r, int size) {
  if (count * element_bytes <= kOnePhaseBytes) {
    return count * element_bytes * (size - 1);
  }
  const auto [begin, end] = all_reduce_chunk(count, r, size);
  const auto own = end - begin;
  return (count - own + own * (size - 1)) * element_bytes;
}

OperationHeader::OperationHeader(const Operation& operation)
    : number(operation.number),
      bytes(operation.bytes),
      op(static_cast<std::int32_t>(operation.op)),
      dtype(static_cast<std::int32_t>(operation.dtype)),
      detail(operation.detail) {
  operation.unit.copy(unit, sizeof(unit) - 1);
}

std::string OperationHeader::text() const {
  const auto kind = static_cast<Op>(op);
  std::string text(name_of(kind));
  if (unit[0] != '\0') {
    text += " of unit '" + std::string(unit) + "'";
  }
  text += c10::str(", ", bytes, " bytes of ", static_cast<c10::ScalarType>(dtype));
  if (kind == Op::kBroadcast) {
    text += c10::str(" from rank ", detail);
  } else if (kind == Op::kAllReduce) {
    text += detail == static_cast<int>(ReduceOp::kMax) ? " (maximum)" : " (sum)";
  }
  return text;
}

void check_all_gather(
    const at::Tensor& output, const at::Tensor& input, int size, c10::DeviceType device, std::string_view unit) {
  check_tensor(input, "input", Op::kAllGather, device, unit);
  check_tensor(output, "output", Op::kAllGather, device, unit);
  TORCH_CHECK_VALUE(
      output.scalar_type() == input.scalar_type() && output.numel() == input.numel() * size, "[all_gather] unit '",
      unit, "': the output must hold ", size, " inputs (", input.numel() * size, " elements of ", input.scalar_type(),
      "), got ", output.numel(), " of ", output.scalar_type());
}

void check_reduce_scatter(
    const at::Tensor& output, const at::Tensor& input, double divisor, int size, c10::DeviceType device,
    std::string_view unit) {
  check_tensor(input, "input", Op::kReduceScatter, device, unit);
  check_tensor(output, "output", Op::kReduceScatter, device, unit);
  TORCH_CHECK_VALUE(
      output.scalar_type() == input.scalar_type() && output.numel() * size == input.numel(), "[reduce_scatter] unit '",
      unit, "': the input must hold ", size, " outputs (", output.numel() * size, " elements of ", output.scalar_type(),
      "), got ", input.numel(), " of ", input.scalar_type(), "; pad it to a multiple of ", size);
  check_divisor(input, divisor, Op::kReduceScatter, unit);
}

void check_all_reduce(const at::Tensor& tensor, double divisor, c10::DeviceType device, std::string_view unit) {
  check_tensor(tensor, "tensor", Op::kAllReduce, device, unit);
  check_divisor(tensor, divisor, Op::kAllReduce, unit);
}

void check_broadcast(const at::Tensor& tensor, int root, int size, c10::DeviceType device, std::string_view unit) {
  check_tensor(tensor, "tensor", Op::kBroadcast, device, unit);
  TORCH_CHECK_VALUE(
      root >= 0 && root < size, "[broadcast] unit '", unit, "': expected a root in [0, ", size, "), got ", root);
}

void check_exchange(const std::string& mine) {
  TORCH_CHECK_VALUE(
      mine.size() <= kMaxExchangeBytes, "[exchange] expected at most ", kMaxExchangeBytes, " bytes, got ", mine.size(),
      "; send larger things as tensors");
}

} // namespace ebb::comm
