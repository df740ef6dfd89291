// Products of rows with panels of all grouped forms.
#include "group_panels.h"

GroupPanel group_panel(int form, int rows) {
  for (auto panels : {group_panel_4, group_panel_5, group_panel_8, group_panel_table})
    if (GroupPanel panel = panels(form, rows)) return panel;
  return nullptr;
}
