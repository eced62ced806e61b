//! Components as engines outside of this crate read them: GPU kernels that compute all pairs of a block.

use std::sync::Arc;

use longspan_pattern::TokenSteps;
use longspan_pattern::residues::Steps;

use super::split::split_by_blocks;
use super::{Component, Components, HeadMap, Part};
use crate::check;
use crate::dims::{Dims, Sizes};
use crate::error::Result;
use crate::exec::{Hook, Monitor};
use crate::layouts::Layouts;
use crate::options::Options;

/// One call of [`Components`]: some tokens and heads of the tensors, and which of their pairs are active.
#[derive(Debug, Clone, Copy)]
pub struct ComponentCall<'a> {
    component: &'a Component,
    of: &'a Components,
}

impl Components {
    /// Layouts as they are, over all tokens and heads of tensors of these dims. Options are the defaults.
    ///
    /// ```
    /// use longspan::{Components, Dims, Hook, Layout, Pattern, Shape};
    ///
    /// let pattern: Pattern = "causal & (window(64, 0) | strided(64))".parse()?;
    /// let layout = Layout::compile(&pattern, &Shape::new(4_096, 4_096))?;
    /// let dims = Dims { batch: 2, tokens: 4_096, heads: 4, dim: 64 };
    /// let components = Components::of_layouts(layout, dims, dims)?;
    /// assert!(components.calls().next().unwrap().is_whole());
    ///
    /// // The window, and 64 sequences of 64 tokens that are 64 tokens apart.
    /// let components = components.split_by_blocks(Hook::none())?;
    /// let calls: Vec<_> = components.calls().collect();
    /// let segments = calls[1].queries().segments;
    /// assert_eq!((calls.len(), segments.count, calls[1].queries().tokens.step), (2, 64, 64));
    /// let layout = calls[1].layouts().get(5, 0);
    /// assert_eq!((layout.queries(), layout.query_positions().get(1)), (64, Some(69)));
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn of_layouts(layouts: impl Into<Layouts>, q: Dims, k: Dims) -> Result<Self> {
        let layouts = layouts.into();
        check::query_and_key(q, k)?;
        check::layouts(&layouts, q, k)?;
        let list = vec![Component { layouts, part: Part::All, weight: 1, place: None }];
        let (heads, lens) = (HeadMap::all(q.heads, k.heads), (q.tokens, k.tokens));
        let whole = Components::new(list, heads, lens, Some(q.batch), Options::default());
        Ok(Components { natural: true, ..whole })
    }

    /// The same for engines that compute all pairs of a block: layouts whose own components have at most
    /// half as many blocks are split into them. The choice follows from the layouts alone.
    pub fn split_by_blocks(&self, hook: Hook<'_>) -> Result<Self> {
        if !self.natural {
            return Ok(self.clone());
        }
        let monitor = Monitor::new(hook);
        let mut list = Vec::new();
        for component in &*self.list {
            let call = ComponentCall { component, of: self };
            let own = split_by_blocks(&component.layouts, &call.sizes(), &monitor)?;
            match own {
                Some(own) => list.extend(own.iter().map(|inner| inner.within(component))),
                None => list.push(component.clone()),
            }
        }
        Ok(Components { list: Arc::new(list), natural: false, ..self.clone() })
    }

    /// The calls. Each pair of a query and a key that attention has is active in one of them; with
    /// [weighted](crate::Overlap::Weighted) branches, in one per branch that has it.
    pub fn calls(&self) -> impl ExactSizeIterator<Item = ComponentCall<'_>> {
        self.list.iter().map(|component| ComponentCall { component, of: self })
    }
}

impl<'a> ComponentCall<'a> {
    /// The layout of each segment and query head of the call. Where it [is whole](Self::is_whole), that
    /// of each batch entry and query head; a set of one entry is for all of them.
    pub fn layouts(&self) -> &'a Layouts {
        &self.component.layouts
    }

    /// The batch entry whose tokens it has; `None` where it is made for each of them.
    pub fn entry(&self) -> Option<usize> {
        self.component.place.map(|place| place.entry)
    }

    /// The queries that it has.
    pub fn queries(&self) -> TokenSteps {
        match self.component.part {
            Part::All => all_tokens(self.of.queries),
            Part::Some { queries, .. } => {
                TokenSteps { segments: queries.segments, tokens: queries.tokens }
            }
        }
    }

    /// The keys that it has, as many segments as of queries.
    pub fn keys(&self) -> TokenSteps {
        match self.component.part {
            Part::All => all_tokens(self.of.keys),
            Part::Some { keys, .. } => TokenSteps { segments: keys.segments, tokens: keys.tokens },
        }
    }

    /// The heads of the query tensor that it has.
    pub fn query_heads(&self) -> Steps {
        match self.component.part {
            Part::All => all(self.of.heads.heads()),
            Part::Some { queries, .. } => queries.heads,
        }
    }

    /// The heads of the key tensor that it has, of which each is that of as many adjacent query heads of
    /// the call.
    pub fn key_heads(&self) -> Steps {
        match self.component.part {
            Part::All => all(self.of.heads.key_heads()),
            Part::Some { keys, .. } => keys.heads,
        }
    }

    /// Whether it has the tensors as they are: all tokens and heads of all batch entries, in order.
    pub fn is_whole(&self) -> bool {
        let (queries, keys) = (all_tokens(self.of.queries), all_tokens(self.of.keys));
        let heads = (all(self.of.heads.heads()), all(self.of.heads.key_heads()));
        self.entry().is_none()
            && (self.queries(), self.keys()) == (queries, keys)
            && (self.query_heads(), self.key_heads()) == heads
    }

    fn sizes(&self) -> Sizes {
        let batch = match (&self.component.part, &self.component.layouts) {
            (Part::Some { queries, .. }, _) => queries.segments.count,
            (Part::All, Layouts::Each(set)) => set.batch(),
            (Part::All, Layouts::One(_)) => 1,
        };
        Sizes {
            batch,
            queries: self.queries().tokens.count,
            keys: self.keys().tokens.count,
            heads: self.query_heads().count,
            key_heads: self.key_heads().count,
            dim: 1,
            value_dim: 1,
        }
    }
}

fn all(count: usize) -> Steps {
    Steps { first: 0, step: 1, count }
}

fn all_tokens(count: usize) -> TokenSteps {
    TokenSteps { segments: all(1), tokens: all(count) }
}
