// The products of rows with panels of all forms in groups.
#include "group_panels.h"

GroupPanel group_panel(int form, int rows) {
  for (auto panels : {group_panel_4, group_panel_5, group_panel_8, group_panel_table})
    if (GroupPanel panel = panels(form, rows)) return panel;
  return nullptr;
}
