//! Compiles a pattern for growing lengths: the layout grows with the tokens, not with their square.
//!
//! ```sh
//! cargo run --release -p longspan-pattern --example density
//! ```

#![expect(clippy::print_stdout, reason = "the table is the example's result")]

use longspan_pattern::{Layout, Pattern, Shape};

fn main() -> Result<(), longspan_pattern::Error> {
    let pattern: Pattern = "causal & (window(1024, 0) | sinks(64))".parse()?;
    println!("{pattern}\n{:>10} {:>14} {:>10}", "tokens", "active blocks", "density");
    for exponent in [12, 14, 16, 18, 20] {
        let tokens = 1 << exponent;
        let layout = Layout::compile(&pattern, &Shape::new(tokens, tokens))?;
        let blocks = layout.counts()?.active_blocks();
        println!("{tokens:>10} {blocks:>14} {:>8.3} %", 100.0 * layout.density()?);
    }
    Ok(())
}
