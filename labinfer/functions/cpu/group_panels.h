// Products of rows with panels of grouped forms. They take long to compile, so each code width has a file of its own.
#pragma once

#include "rounded.h"

GroupPanel group_panel_4(int form, int rows);
GroupPanel group_panel_5(int form, int rows);
GroupPanel group_panel_8(int form, int rows);
GroupPanel group_panel_table(int form, int rows);

namespace {

template <int ROWS, typename Form>
void multiply(const void* x, const uint8_t* weight, int64_t groups, int64_t group, const int32_t* start, int64_t starts, bool adds, float* out,
              const void* stream) {
  panel_groups<ROWS, typename Form::Coding, Form::OFFSET>((const typename Form::Dot::Input*)x, weight, groups, group, start, starts, adds, out,
                                                          *(const Stream*)stream);
}

template <typename Form, int... ROWS>
GroupPanel panel_among(int rows, std::integer_sequence<int, ROWS...>) {
  static constexpr GroupPanel panels[] = {multiply<ROWS + 1, Form>...};
  return panels[rows - 1];
}

// Product function of a form with the number `form` among Forms; null if there is none.
template <typename... Forms>
GroupPanel panel_among_forms(int form, int rows) {
  GroupPanel panel = nullptr;
  ((form == Forms::NUMBER ? void(panel = panel_among<Forms>(rows, std::make_integer_sequence<int, Forms::ROWS>{})) : void()), ...);
  return panel;
}

}  // namespace
