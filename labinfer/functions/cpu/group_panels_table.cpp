// Products with weights in groups of 4-bit codes that index a table of values.
#include "group_panels.h"

GroupPanel group_panel_table(int form, int rows) {
  return panel_among_forms<Grouped<E2m1>, Grouped<Nvfp4>, Grouped<Iq4>>(form, rows);
}
