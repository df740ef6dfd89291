// Products with weights in groups of 5-bit codes.
#include "group_panels.h"

GroupPanel group_panel_5(int form, int rows) {
  return panel_among_forms<Grouped<Uniform<5>>, Grouped<Uniform<5>, MINIMA>>(form, rows);
}
