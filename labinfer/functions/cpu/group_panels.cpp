// The products of rows with panels of all forms in groups.
#include "rounded.h"

namespace {

template <int ROWS, typename Form>
void multiply(const int8_t* x, int64_t stride, const uint8_t* weight, int64_t groups, int64_t group, const int32_t* start,
              float* out, const void* stream) {
  panel_groups<ROWS, typename Form::Coding, Form::OFFSET>(x, stride, weight, groups, group, start, out, *(const Stream*)stream);
}

template <typename Form, int... ROWS>
GroupPanel panel_among(int rows, std::integer_sequence<int, ROWS...>) {
  static constexpr GroupPanel found[] = {multiply<ROWS + 1, Form>...};
  return found[rows - 1];
}

template <typename... Forms>
GroupPanel panel_of(int form, int rows) {
  GroupPanel found = nullptr;
  ((form == Forms::NUMBER ? void(found = panel_among<Forms>(rows, std::make_integer_sequence<int, Forms::ROWS>{})) : void()), ...);
  return found;
}

}  // namespace

GroupPanel group_panel(int form, int rows) {
  return panel_of<Grouped<Uniform<4>>, Grouped<Uniform<4>, ZEROS>, Grouped<Uniform<4>, MINIMA>, Grouped<Uniform<5>>,
                  Grouped<Uniform<5>, MINIMA>, Grouped<Uniform<8>>, Grouped<Uniform<8>, ZEROS>, Grouped<Uniform<8>, MINIMA>,
                  Grouped<E2m1>, Grouped<Iq4>>(form, rows);
}
