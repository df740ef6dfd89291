// Products with weights in groups of 4-bit codes.
#include "group_panels.h"

GroupPanel group_panel_4(int form, int rows) {
  return panel_among_forms<Grouped<Uniform<4>>, Grouped<Uniform<4>, ZEROS>, Grouped<Uniform<4>, MINIMA>>(form, rows);
}
