// Products with weights in groups of 8-bit codes.
#include "group_panels.h"

GroupPanel group_panel_8(int form, int rows) {
  return panel_among_forms<Grouped<Uniform<8>>, Grouped<Uniform<8>, ZEROS>, Grouped<Uniform<8>, MINIMA>>(form, rows);
}
