"""Turn model facts and requested techniques into a frozen, batch-free Plan, without process group or GPU."""
