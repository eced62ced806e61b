//! Calls on the threads of a rayon pool.

use super::{Executor, Step};

/// Calls run on the pool's threads and on the calling thread. rayon allocates a job per
/// participating thread and call.
impl Executor for rayon::ThreadPool {
    fn threads(&self) -> usize {
        self.current_num_threads()
    }

    fn run(&self, threads: usize, step: &Step<'_>) {
        let all = || while step().is_continue() {};
        self.in_place_scope(|scope| {
            for _ in 1..threads.min(self.current_num_threads() + 1) {
                scope.spawn(move |_| all());
            }
            all();
        });
    }
}
