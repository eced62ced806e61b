//! The longspan command.
fn main() {}
