//! A case of any pattern and shape, compiled and compared with the oracle at every position.
#![no_main]

use libfuzzer_sys::fuzz_target;
use longspan_testing::Case;

#[path = "../../crates/pattern/tests/common/mod.rs"]
mod common;

fuzz_target!(|case: Case| {
    if let Err(error) = common::check(&case) {
        panic!("{error}\n{case}");
    }
});
